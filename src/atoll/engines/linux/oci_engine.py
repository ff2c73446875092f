"""The `oci` engine: sandboxes that an OCI runtime makes, with namespaces or with a kernel of their own."""

from __future__ import annotations

import asyncio
import os

from atoll.engines.engine_traces import traced_engine
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.runtimes import oci_runtimes, runtime_launchers
from atoll.engines.linux.runtimes.gvisor_memory import GvisorMemory
from atoll.engines.linux.runtimes.runtime_launchers import RuntimeLaunchers
from atoll.errors import SandboxError
from atoll.model import SandboxSpec
from atoll.model.state import Availability
from atoll.settings import Settings


@traced_engine
class OciEngine(LinuxEngine):
    """A `LinuxEngine` with a launcher for each runtime.

    `runtime` names the one to use for specs that ask for its kind of isolation or for none in particular.
    """

    name = "oci"

    def __init__(self, settings: Settings, runtime: str | None = None) -> None:
        layout = SandboxLayout(settings, Hierarchy.find())
        super().__init__(layout, RuntimeLaunchers(layout, runtime), GvisorMemory(settings.data_dir))

    @classmethod
    def probe(cls, settings: Settings, *, thorough: bool) -> Availability:
        """Whether the engine can work here. With `thorough` a sandbox is made for real."""
        problems = runtime_launchers.problems(settings)
        if problems:
            return Availability(cls.name, False, tuple(problems), tuple(problems.values()))
        runtime = oci_runtimes.find("namespaces", settings.data_dir)
        if thorough:
            try:
                asyncio.run(_try_out(cls(settings)))
            except SandboxError as error:
                return Availability(cls.name, False, (error.reason,), ((error.hint,) if error.hint else ()))
        return Availability(cls.name, True, (f"runtime {runtime.name} at {runtime.program}",))


async def _try_out(engine: OciEngine) -> None:
    handle = await engine.create(f"probe-{os.urandom(6).hex()}", SandboxSpec())
    await engine.delete(handle)
    await engine.aclose()
