"""One sandbox of one engine: what names it, and the limits that hold for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from atoll.model.spec import Limits, SandboxSpec
from atoll.model.state import Cause, Observation, State

OWN_LABELS = "atoll."
"""What labels begin with that belong to Atoll. Users cannot set them."""
NAME_LABEL = "atoll.name"
"""The label that holds the name of a sandbox."""
MANAGER_LABEL = "atoll.manager"
"""The label that says which manager a sandbox belongs to. Names of such sandboxes are their manager's matter."""


@dataclass(frozen=True, slots=True)
class Handle:
    """Names one sandbox of one engine. Plain data: it can be written down and used by another process."""

    engine: str
    sandbox_id: str
    spec: SandboxSpec
    created_at: float
    details: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str | None:
        """The name that was chosen for the sandbox."""
        return self.spec.labels.get(NAME_LABEL)

    @property
    def isolation(self) -> str | None:
        """The isolation level that the sandbox has. None: the engine has not noted it, and the spec asks for none."""
        return self.details.get(ISOLATION, self.spec.isolation)

    def limits(self) -> EffectiveLimits:
        """The limits that hold, whether they were asked for or are the engine's defaults."""
        return effective_limits(self.spec, self.details)


DEFAULTS, LEFT_OUT = "default_limits", "limits_left_out"
"""Keys in the details of a handle: the default limits that the engine set, and the defaults that it cannot enforce."""
ISOLATION = "isolation"
"""Key in the details of a handle: the isolation level that the sandbox has, whether or not its spec asked for one."""


@dataclass(frozen=True, slots=True)
class EffectiveLimits:
    limits: Limits
    """The limits that are enforced."""
    left_out: tuple[str, ...] = ()
    """The names of defaults that cannot be enforced here. Only the size of the machine limits these."""


def effective_limits(spec: SandboxSpec, details: dict[str, str]) -> EffectiveLimits:
    limits = spec.limits.over(_limits(details[DEFAULTS])) if DEFAULTS in details else spec.limits
    return EffectiveLimits(limits, tuple(details.get(LEFT_OUT, "").split()))


@lru_cache(maxsize=64)  # an engine's defaults are the same for all of its sandboxes
def _limits(text: str) -> Limits:
    return Limits.model_validate_json(text)


@dataclass(frozen=True, slots=True)
class SandboxDetails:
    """What a sandbox is and has. Only its limits can change."""

    id: str
    engine: str
    image: str
    isolation: str | None
    """The isolation level that the sandbox has: `namespaces`, `gvisor` or `vm`. None: it is not isolated at all, which
    only the engine `unsafe-none` does."""
    limits: Limits
    """The limits that are enforced, whether they were asked for or are the engine's defaults."""
    limits_left_out: tuple[str, ...] = ()
    """The names of default limits that cannot be enforced here."""

    @classmethod
    def of(cls, handle: Handle) -> SandboxDetails:
        """Return the properties of the sandbox that this handle names."""
        held = handle.limits()
        return cls(
            id=handle.sandbox_id,
            engine=handle.engine,
            image=handle.spec.image,
            isolation=handle.details.get("isolation", handle.spec.isolation),
            limits=held.limits,
            limits_left_out=held.left_out,
        )


@dataclass(frozen=True, slots=True)
class ListedSandbox:
    """A sandbox in a list: how to find it, and how it is."""

    id: str
    """The id by which `attach` finds it."""
    engine: str
    image: str
    state: State
    cause: Cause | None
    """Why it ended, if it has."""
    reason: str
    """The cause in words."""
    created_at: float
    """When it was created, in seconds since 1970."""
    name: str | None
    labels: dict[str, str]

    @classmethod
    def of(cls, handle: Handle, seen: Observation) -> ListedSandbox:
        # Atoll's own labels are shown only as what they mean.
        labels = {name: value for name, value in handle.spec.labels.items() if not name.startswith(OWN_LABELS)}
        return cls(
            handle.sandbox_id,
            handle.engine,
            handle.spec.image,
            seen.state,
            seen.cause,
            seen.reason,
            handle.created_at,
            handle.name,
            labels,
        )
