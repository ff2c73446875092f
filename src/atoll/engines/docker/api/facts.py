"""What a Docker engine can do, according to its own description."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from typing import Any

from atoll.engines.docker.api.disk_limit import Storage, storage_of
from atoll.engines.docker.api.http import Http, RefusedError
from atoll.engines.enforcement import enforceable_defaults
from atoll.errors import EngineUnavailableError, UnsupportedError
from atoll.model import Capability, EffectiveLimits, Limits, SandboxSpec

ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
"""The architectures that the agent is made for, with their names in seccomp profiles."""
_FRESH_S = 30.0
_ALWAYS = frozenset(
    {
        Capability.OPEN_FILES,
        Capability.SHM,
        Capability.VOLUMES,
        Capability.NAMED_VOLUMES,
        Capability.IMAGES,
        Capability.PAUSE,
        Capability.CHECKPOINTS,
        Capability.USERS,
        Capability.ISOLATION,
    }
)
_GVISOR = ("runsc", "runsc-systrap", "runsc-kvm")
_VIRTUAL = ("kata-runtime", "kata", "kata-qemu", "kata-clh", "io.containerd.kata.v2")
_NAMESPACES = ("runc", "crun", "youki")
_RUNTIMES = {"namespaces": _NAMESPACES, "gvisor": _GVISOR, "vm": _VIRTUAL}
_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class Facts:
    version: str
    architecture: str
    runtimes: frozenset[str]
    default_runtime: str
    root_dir: str
    memory: bool
    cpus: bool
    pids: bool
    disk: bool
    seccomp: bool
    user_namespace: bool = False
    """Whether root in a container is an ordinary user outside of it."""
    processors: int = 1
    machine_cpus: int = 4096
    machine_memory_bytes: int = 1 << 62
    cgroup_driver: str = ""
    storage: Storage = field(default_factory=Storage)

    @property
    def capabilities(self) -> frozenset[Capability]:
        asked = {
            Capability.MEMORY: self.memory,
            Capability.CPUS: self.cpus,
            # The host counts the threads of such a kernel, not the processes inside.
            Capability.PIDS: self.pids and not has_own_kernel(self.default_runtime),
            Capability.DISK: self.disk,
        }
        return _ALWAYS | {capability for capability, there in asked.items() if there}

    @property
    def isolation(self) -> str:
        """The isolation level of the default OCI runtime."""
        return isolation_of(self.default_runtime)

    @property
    def levels(self) -> tuple[str, ...]:
        """The isolation levels that the engine has a runtime for, the default one first."""
        found = {level for level, names in _RUNTIMES.items() if self.runtimes.intersection(names)}
        return (self.isolation, *sorted(found - {self.isolation}, reverse=True))

    @property
    def problems(self) -> dict[Capability, str]:
        """The reasons why limits cannot be enforced, as far as they are known."""
        return {Capability.DISK: self.storage.problem} if self.storage.problem else {}

    def defaults(self, wanted: Limits, spec: SandboxSpec) -> EffectiveLimits:
        """Return the default limits of a sandbox, which never exceed the resources of the engine's machine."""
        found = self.capabilities
        if has_own_kernel(self.runtime(spec)):
            found -= {Capability.PIDS}
        most = {"cpus": float(self.machine_cpus), "memory_bytes": self.machine_memory_bytes}
        update = {name: min(value, most[name]) for name in most if (value := getattr(wanted, name)) is not None}
        return enforceable_defaults(wanted.model_copy(update=update), found, spec.limits)

    def runtime(self, spec: SandboxSpec) -> str:
        """Return the name of the OCI runtime for the requested isolation level. Raises UnsupportedError if there is
        none."""
        if spec.isolation is None:
            return self.default_runtime
        wanted = _RUNTIMES[spec.isolation]
        for name in (self.default_runtime, *wanted):
            if name in wanted and name in self.runtimes:
                if has_own_kernel(name) and spec.limits.pids is not None:
                    raise UnsupportedError(
                        f"engine 'docker' cannot enforce pids under {name}: the host does not see the processes inside",
                        hint="Leave that limit out: whatever they are, they share the sandbox's memory and processors.",
                    )
                return name
        raise UnsupportedError(
            f"engine 'docker' cannot isolate by {spec.isolation}: the Docker engine has no runtime {wanted[0]}",
            hint=f"Add one to 'runtimes' in its daemon.json, or choose another engine. "
            f"It has: {', '.join(sorted(self.runtimes))}.",
        )

    def require_usable(self) -> None:
        """Raise EngineUnavailableError if no sandbox can work there."""
        if self.architecture not in ARCHITECTURES or self.architecture != platform.machine():
            raise EngineUnavailableError(
                f"the Docker engine runs on {self.architecture}, but Atoll's agent is built for {platform.machine()}",
                hint="Use an engine on a machine of the same architecture.",
            )
        if not self.seccomp:
            raise EngineUnavailableError(
                "the Docker engine cannot filter system calls (seccomp)", hint="Use an engine that can."
            )


_known: dict[str, tuple[float, Facts]] = {}


async def learn(http: Http) -> Facts:
    """Return the facts about a Docker engine, at most half a minute old: the answer takes the engine ten milliseconds.
    Raises EngineUnavailableError."""
    key = str(http.endpoint)
    at, facts = _known.get(key, (0.0, None))
    if facts is None or time.monotonic() - at > _FRESH_S:
        try:
            facts = parse(await http.call("GET", "/info"))
        except RefusedError as error:
            raise EngineUnavailableError(
                f"the Docker engine at {http.endpoint} does not work: {error.message}",
                hint="'docker info' may say more.",
            ) from error
        _known[key] = (time.monotonic(), facts)
    return facts


def machine(architecture: str) -> str:
    """The architecture as `uname -m` names it."""
    return _ARCHITECTURES.get(architecture, architecture)


def is_gvisor(runtime: str) -> bool:
    return runtime in _GVISOR


def isolation_of(runtime: str) -> str:
    """Return the isolation level of an OCI runtime. One that is not known is trusted to do no more than runc."""
    if is_gvisor(runtime):
        return "gvisor"
    return "vm" if has_own_kernel(runtime) else "namespaces"


def has_own_kernel(runtime: str) -> bool:
    """Return whether containers of this OCI runtime run on another kernel than the host's."""
    return is_gvisor(runtime) or runtime in _VIRTUAL


def parse(info: Any) -> Facts:
    if not isinstance(info, dict) or info.get("OSType", "linux") != "linux":
        raise EngineUnavailableError(
            "the Docker engine does not run Linux containers", hint="Switch it to Linux containers."
        )
    version, storage = str(info.get("ServerVersion", "unknown")), storage_of(info)
    return Facts(
        version=version,
        architecture=machine(str(info.get("Architecture", ""))),
        runtimes=frozenset(info.get("Runtimes") or ()),
        default_runtime=str(info.get("DefaultRuntime") or "runc"),
        root_dir=str(info.get("DockerRootDir") or ""),
        # A memory limit that does not include swap is no limit.
        memory=bool(info.get("MemoryLimit")) and bool(info.get("SwapLimit")),
        cpus=bool(info.get("CpuCfsQuota")),
        pids=bool(info.get("PidsLimit")),
        disk=not storage.problem,
        storage=storage,
        seccomp=_has_option(info, "seccomp"),
        user_namespace=_has_option(info, "userns") or _has_option(info, "rootless"),
        processors=int(info.get("NCPU") or 1),
        machine_cpus=int(info.get("NCPU") or 4096),
        machine_memory_bytes=int(info.get("MemTotal") or 1 << 62),
        cgroup_driver=str(info.get("CgroupDriver") or ""),
    )


def _has_option(info: dict[str, Any], name: str) -> bool:
    return any(f"name={name}" in str(option).split(",") for option in info.get("SecurityOptions") or ())
