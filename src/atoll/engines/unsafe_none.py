"""The engine `unsafe-none`: plain processes without any isolation.

It is meant for trusted code on a machine where nothing else works. It is available only under this name and is never
chosen by `auto`.
"""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import ExitStack
from pathlib import Path

from atoll import agent_binary
from atoll.engines.engine_traces import traced_engine
from atoll.engines.host.process_ref import ProcessRef, descendants, each_process, kill_all
from atoll.engines.process_tree import Launch, ProcessTreeEngine, Record, clean_environment
from atoll.errors import EngineUnavailableError, UnsupportedError
from atoll.model import Capability, SandboxSpec
from atoll.model.state import Availability
from atoll.settings import Settings
from atoll.waiting import Deadline

_MARK = "ATOLL_SANDBOX_HOME"
_WARNING = "engine 'unsafe-none' gives no isolation: code in this sandbox can do whatever you can do on this machine"


class UnsafeWarning(UserWarning):
    """A warning that code runs without isolation."""


@traced_engine
class UnsafeEngine(ProcessTreeEngine):
    """Processes in a directory of their own, with a clean environment. Nothing confines them to it."""

    name = directory = "unsafe-none"
    capabilities = frozenset({Capability.OPEN_FILES})
    isolation = None

    @classmethod
    def probe(cls, settings: Settings, *, thorough: bool) -> Availability:
        try:
            agent_binary.path()
        except EngineUnavailableError as error:
            return Availability(cls.name, False, (error.reason,), (error.hint or "",))
        return Availability(cls.name, True, ("no isolation: never chosen automatically, only by its name",))

    def _check(self, spec: SandboxSpec) -> None:
        self._check_image(spec.image)
        if spec.isolation is not None:
            raise UnsupportedError(f"engine '{self.name}' isolates nothing", hint="Choose another engine.")
        if spec.limits.lifetime_s is not None:
            raise UnsupportedError(
                f"engine '{self.name}' cannot enforce a lifetime", hint="Leave it out, or choose another engine."
            )
        logging.getLogger(__name__).warning(_WARNING)
        warnings.warn(_WARNING, UnsafeWarning, stacklevel=2)

    def _launch(self, record: Record, home: Path, listener: int, resources: ExitStack) -> Launch:
        agent = agent_binary.path()
        for name in ("work", "home"):
            (home / name).mkdir(mode=0o700)
        argv = [str(agent), "--listen-fd", str(listener), "--work-dir", str(home / "work")]
        if record.limits.open_files is not None:
            argv += ["--rlimit-nofile", str(record.limits.open_files)]
        environment = clean_environment(record.sandbox_id, record.spec, str(home / "home"), "user")
        return Launch(argv=argv, env=environment | {_MARK: str(home)}, fds=(), init=lambda monitor: monitor)

    async def _kill(self, sandbox_id: str, record: Record | None, known: set[ProcessRef], deadline: Deadline) -> bool:
        # First the processes below the agent, while it still holds them together, then those that have left the tree.
        agents = {process for process in known if process.is_alive()}
        return (
            await kill_all(lambda: {found for agent in agents for found in _below(agent)}, deadline)
            and await super()._kill(sandbox_id, record, known, deadline)
            and await kill_all(lambda: self._find_processes(sandbox_id), deadline)
        )

    def _find_processes(self, sandbox_id: str) -> set[ProcessRef]:
        """Find the agent by its work directory, and other processes by the environment, which programs usually pass
        on."""
        home = self._records.home(sandbox_id)
        arguments = [b"--work-dir", os.fsencode(home / "work")]
        variable = os.fsencode(f"{_MARK}={home}")
        found = set()
        for pid in each_process():
            process = ProcessRef.of(pid)
            if process and (_holds(pid, "cmdline", *arguments) or _holds(pid, "environ", variable)):
                found.add(process)
        return found


def _holds(pid: int, file: str, *words: bytes) -> bool:
    try:
        return set(words) <= set(Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0"))
    except OSError:
        return False


def _below(agent: ProcessRef) -> set[ProcessRef]:
    if not agent.is_alive():
        return set()
    return {process for pid in descendants(agent.pid) if (process := ProcessRef.of(pid)) is not None}
