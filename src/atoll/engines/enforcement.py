"""Which limits and controls of a spec an engine enforces.

A limit in the spec that cannot be enforced is refused; a default limit that cannot be enforced is left out and
reported.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.errors import SpecError, UnsupportedError
from atoll.model import DEFAULTS, LEFT_OUT, Capability, EffectiveLimits, Limits, SandboxSpec, default_user

_CAPABILITY_OF = {
    "memory_bytes": Capability.MEMORY,
    "cpus": Capability.CPUS,
    "pids": Capability.PIDS,
    "disk_bytes": Capability.DISK,
    "open_files": Capability.OPEN_FILES,
}


def enforceable_defaults(wanted: Limits, capabilities: frozenset[Capability], asked: Limits) -> EffectiveLimits:
    """Return the machine's default limits that this engine can enforce, and the names of those it cannot."""
    given: dict[str, object] = {}
    left_out = []
    for name, capability in _CAPABILITY_OF.items():
        if getattr(asked, name) is None and getattr(wanted, name) is not None:
            if capability in capabilities:
                given[name] = getattr(wanted, name)
            else:
                left_out.append(name)
    return EffectiveLimits(_NO_LIMITS.model_copy(update=given), tuple(left_out))


def limit_details(defaults: EffectiveLimits) -> dict[str, str]:
    """Return default limits as details of a handle."""
    given = defaults.limits.model_dump_json(exclude_none=True)
    return {DEFAULTS: given, **({LEFT_OUT: " ".join(defaults.left_out)} if defaults.left_out else {})}


_NO_LIMITS = Limits()
LATER = ("memory_bytes", "cpus", "pids")
"""The limits that a spare of a pool may lack, and get when it is claimed."""
_CHANGEABLE = ("memory_bytes", "cpus", "pids", "disk_bytes")


def changeable_limits(capabilities: frozenset[Capability]) -> frozenset[str]:
    """Return the limits that can be changed while a sandbox runs, among those that an engine of this machine
    enforces."""
    return frozenset(name for name in _CHANGEABLE if _CAPABILITY_OF[name] in capabilities)


def given_limits(limits: Limits) -> dict[str, object]:
    """Return the limits that are named, by name."""
    return {name: value for name in Limits.model_fields if (value := getattr(limits, name)) is not None}


def refuse_unchangeable(engine: str, changeable: frozenset[str], limits: Limits) -> None:
    """Raise UnsupportedError that names all limits that cannot be changed while a sandbox runs, and SpecError if there
    is nothing to change."""
    given = given_limits(limits)
    if not given:
        raise SpecError("no limit is named", hint="Name at least one: memory, cpus, pids or disk.")
    fixed = [name for name in given if name not in changeable]
    if fixed:
        can = ", ".join(sorted(changeable))
        raise UnsupportedError(
            f"engine '{engine}' cannot change {', '.join(fixed)} while a sandbox runs",
            hint=f"It can change {can}." if can else "Make a new sandbox with the limits that you need.",
        )


def refuse_unsupported(
    engine: str,
    capabilities: frozenset[Capability],
    spec: SandboxSpec,
    why: Mapping[Capability, str] | None = None,
    *,
    saves_memory: bool = False,
) -> None:
    """Raise UnsupportedError if the spec needs a control that is not among the capabilities. `why` gives the reasons
    for missing capabilities, as far as they are known. `saves_memory`: the engine can save the memory of the sandbox.
    """
    limits = spec.limits
    if spec.prewarm is not None and not saves_memory:
        raise UnsupportedError(
            f"engine '{engine}' cannot save the memory of this sandbox, which 'prewarm' needs",
            hint="Use isolation='gvisor', which the engine 'oci' has, or leave 'prewarm' out.",
        )
    asked = {
        Capability.MEMORY: limits.memory_bytes,
        Capability.CPUS: limits.cpus,
        Capability.PIDS: limits.pids,
        Capability.DISK: limits.disk_bytes,
        Capability.INODES: limits.inodes,
        Capability.OPEN_FILES: limits.open_files,
        Capability.SHM: limits.shm_bytes,
        Capability.VOLUMES: [volume for volume in spec.volumes if volume.host] or None,
        Capability.NAMED_VOLUMES: spec.named_volumes or None,
        Capability.CHECKPOINTS: spec.undo or spec.prewarm,
        Capability.USERS: default_user(spec),
        Capability.NETWORK: None if spec.network == "none" else spec.network,
    }
    for capability, value in asked.items():
        if value is not None and capability not in capabilities:
            reason = (why or {}).get(capability)
            raise UnsupportedError(
                f"engine '{engine}' cannot enforce {capability.value} here{f': {reason}' if reason else ''}",
                hint="Leave it out, or choose another engine: 'atoll doctor' lists what each one can enforce.",
            )
