"""The launchers of the `oci` engine, one for each OCI runtime. They are chosen by the isolation level of the spec."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from atoll import agent_binary
from atoll.engines.linux.launcher import Isolation, Launcher
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.runtimes import oci_runtimes
from atoll.engines.linux.runtimes.agent_bridges import AgentBridges
from atoll.engines.linux.runtimes.runtime_launcher import RuntimeLauncher
from atoll.engines.linux.runtimes.virtual_kernel import VirtualKernelLauncher
from atoll.errors import EngineUnavailableError
from atoll.model import Capability, SandboxSpec
from atoll.settings import Settings


class RuntimeLaunchers:
    """Implements `Launchers`. `runtime` is the OCI runtime to use for its isolation level, which is then also the level
    of sandboxes whose spec names none."""

    def __init__(self, layout: SandboxLayout, runtime: str | None = None) -> None:
        self._layout = layout
        self.runtime = runtime
        self.isolation: Isolation = oci_runtimes.isolation_of(runtime) if runtime is not None else "namespaces"
        self._bridges = AgentBridges(layout)
        self._launchers: dict[str, Launcher] = {}

    def choose(self, spec: SandboxSpec) -> Launcher:
        for reason, hint in problems(self._layout.settings, needs_runtime=False).items():
            raise EngineUnavailableError(reason, hint=hint)
        isolation = spec.isolation or self.isolation
        preferred = self.runtime if isolation == self.isolation else None
        return self.named(oci_runtimes.find(isolation, self._layout.settings.data_dir, preferred).name)

    def named(self, name: str) -> Launcher:
        if name not in self._launchers:
            if oci_runtimes.isolation_of(name) == "namespaces":
                self._launchers[name] = RuntimeLauncher(self._layout, name)
            else:
                self._launchers[name] = VirtualKernelLauncher(self._layout, name, self._bridges)
        return self._launchers[name]

    def of_handle(self, details: Mapping[str, str]) -> Launcher:
        return self.named(details.get("runtime", oci_runtimes.BY_ISOLATION["namespaces"][0]))

    def has(self, name: str) -> bool:
        return any(name in names for names in oci_runtimes.BY_ISOLATION.values())

    def lacks(self, isolation: Isolation) -> frozenset[Capability]:
        return _LACKS[isolation]

    def levels(self) -> tuple[Isolation, ...]:
        data_dir = self._layout.settings.data_dir
        found = (
            isolation
            for isolation, names in oci_runtimes.BY_ISOLATION.items()
            if any(oci_runtimes.locate(name, data_dir) is not None for name in names)
        )
        return tuple(dict.fromkeys((self.isolation, *found)))

    def forget(self, sandbox_id: str) -> None:
        self._bridges.drop(sandbox_id)

    def rest(self) -> None:
        """Do nothing: these launchers prepare nothing."""

    async def aclose(self) -> None:
        await self._bridges.aclose()


_LACKS: dict[Isolation, frozenset[Capability]] = {
    "namespaces": frozenset((Capability.SAVED_MEMORY,)),
    "gvisor": frozenset((Capability.PIDS,)),  # see `for_virtual_kernel`
    "vm": frozenset((Capability.PIDS, Capability.NETWORK, Capability.SAVED_MEMORY)),
}


def problems(settings: Settings, *, needs_runtime: bool = True) -> dict[str, str]:
    """Return the problems that keep the engine from working, each with a remedy."""
    found = {}
    if platform.system() != "Linux":
        return {"it needs Linux": "Use engine 'docker'."}
    if os.geteuid() != 0:
        found["it needs root"] = "Run as root, or choose engine 'bubblewrap'."
    for program in ("atoll-mount", "atoll-agent"):
        if not os.access(Path(agent_binary.__file__).parent / "bin" / program, os.X_OK):
            found[f"the program '{program}' is missing"] = (
                "In a working copy run 'make agent'; otherwise install the package again."
            )
    if needs_runtime and all(
        oci_runtimes.locate(name, settings.data_dir) is None for name in oci_runtimes.BY_ISOLATION["namespaces"]
    ):
        found["neither runc nor crun is installed"] = "Run 'apt-get install runc'."
    return found
