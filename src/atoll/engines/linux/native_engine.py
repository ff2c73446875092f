"""The `native` engine: sandboxes made by Atoll's own launcher, for root and for ordinary users of the host."""

from __future__ import annotations

import os
from pathlib import Path

from atoll import workers
from atoll.engines.engine_traces import traced_engine
from atoll.engines.host import process_ref
from atoll.engines.host.cgroups.hierarchy import Hierarchy, delegated
from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.native import native_probe, rootless
from atoll.engines.linux.native.native_launcher import NAME, NativeLauncher
from atoll.engines.linux.native.rootless import UserLayers, UserNamespace
from atoll.engines.linux.runtimes.gvisor_memory import GvisorMemory
from atoll.errors import SandboxGoneError
from atoll.model import Capability, Handle, Stats
from atoll.model.state import Availability
from atoll.settings import Settings


@traced_engine
class NativeEngine(LinuxEngine):
    """A `LinuxEngine` with one launcher. It shares its snapshots with `oci`, so it exports and imports gVisor's saved
    memory too."""

    name = NAME

    def __init__(self, settings: Settings) -> None:
        self._namespace = UserNamespace() if os.geteuid() != 0 else None
        if self._namespace is None:
            layout = SandboxLayout(settings, Hierarchy.find())
        else:
            layout = _rootless_layout(settings, self._namespace)
            self.unsupported = rootless.MISSING
        self.launcher = NativeLauncher(layout, self._namespace)
        super().__init__(layout, self.launcher, GvisorMemory(settings.data_dir))

    @classmethod
    def probe(cls, settings: Settings, *, thorough: bool) -> Availability:
        """Find out whether the engine can work here. `thorough` tests the isolation of a sandbox even if that was done
        before."""
        return native_probe.probe(cls(settings), settings, thorough=thorough)

    async def stats(self, handle: Handle) -> Stats:
        if self._namespace is None or Capability.MEMORY in self.capabilities:
            return await super().stats(handle)
        record = self.layout.records.read(handle.sandbox_id)
        if record is None or not record.is_alive() or record.init is None:
            return Stats()
        return await workers.run(workers.ENGINE, process_ref.usage, record.init.pid)

    def first_pid(self, sandbox_id: str) -> int:
        """Return the host's id of the sandbox's first process. Raises SandboxGoneError if there is none."""
        record = self.layout.records.read(sandbox_id)
        if record is None or record.init is None:
            raise SandboxGoneError(f"there is no sandbox '{sandbox_id}'")
        return record.init.pid

    def about(self) -> tuple[str, ...]:
        """Return remarks for users about sandboxes on this machine."""
        return self._namespace.about(self.capabilities) if self._namespace is not None else ()


def _rootless_layout(settings: Settings, namespace: UserNamespace) -> SandboxLayout:
    layers = UserLayers(settings.data_dir / "layers", namespace=namespace)
    mounts, own = (Path(f"/proc/self/{name}").read_text(errors="replace") for name in ("mountinfo", "cgroup"))
    return SandboxLayout(settings, delegated(mounts, own) or Hierarchy("none"), layers)
