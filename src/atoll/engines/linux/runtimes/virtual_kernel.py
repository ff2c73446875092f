"""Makes sandboxes with a kernel of their own: gVisor or a virtual machine.

Descriptors and mounts of the host have no effect inside, so the agent is mounted as a file, and its socket is inside
too; bridges lead to it (`agent_bridges.py`). A virtual kernel that is frozen from outside does not answer, not even its
own tools; one that is paused through the OCI runtime still does. Whether it was paused is recorded in the run
directory, because asking the OCI runtime means starting a program.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.contract import ByteStream
from atoll.engines.host import run_program
from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.linux import network_link
from atoll.engines.linux.launcher import MemorySaving, Progress
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.plan.sandbox_plan import Plan, for_virtual_kernel
from atoll.engines.linux.runtimes import oci_bundle, oci_runtimes
from atoll.engines.linux.runtimes.agent_bridges import AgentBridges
from atoll.engines.linux.runtimes.runtime_call import (
    AGENT,
    AGENT_SOCKET,
    FIRST_FD,
    RuntimeCall,
    memory_file,
    seccomp_filter,
)
from atoll.engines.linux.states.saved_state import VERSION_NOTE
from atoll.errors import AgentUnreachableError, EngineError, EngineUnavailableError
from atoll.images import Image
from atoll.waiting import Deadline

_BRIDGE_S = 30.0
_NOTE = "paused"
_DUMP = ("checkpoint", "--leave-running", "--compression=none", "--exclude-committed-zero-pages")


class VirtualKernelLauncher:
    """Implements `Launcher` and, for gVisor, `MemorySaving`."""

    connects_late = False

    def __init__(self, layout: SandboxLayout, name: str, bridges: AgentBridges) -> None:
        self._layout = layout
        self._bridges = bridges
        self._call = RuntimeCall(layout, name)
        self.name = name
        self.isolation = oci_runtimes.isolation_of(name)
        self.handle_details = self._call.handle_details
        self.memory: MemorySaving | None = self if self.isolation == "gvisor" else None

    def check(self) -> None:
        self._call.runtime()

    async def start(self, record: Record, image: Image | None, progress: Progress, deadline: Deadline) -> ProcessRef:
        """Start the sandbox. The agent's standard streams are one end of a socket pair, which is the first connection.

        That connection is of no use if the sandbox starts from saved memory, because it was closed before the memory
        was saved.
        """
        memory = self._layout.memory(record.memory) if record.memory is not None else None
        with ExitStack() as opened:
            network = None
            if record.spec.network != "none":
                link = workers.run(workers.ENGINE, network_link.prepared, self._layout.gateway, record, opened)
                network = await finish(link)
            plan = await finish(workers.run(workers.ENGINE, self._prepare, record, image, network, memory))
            ours, theirs = socket.socketpair()
            undo = opened.enter_context(ExitStack())
            undo.callback(ours.close)
            with theirs:
                init = await self._run(plan, theirs, memory, deadline, opened)
            if memory is None:
                undo.pop_all()
                ours.setblocking(False)
                self._bridges.put(record.sandbox_id, ours)
        self._call.settle(record.sandbox_id)
        return init

    async def _run(
        self, plan: Plan, stream: socket.socket, memory: Path | None, deadline: Deadline, opened: ExitStack
    ) -> ProcessRef:
        null = run_program.nothing()
        opened.callback(os.close, null)
        fds: list[int] = []
        guard = None
        if plan.is_supervised:
            fds.append(memory_file(seccomp_filter(plan.seccomp, plan.machine), opened))
            fds.append(await self._call.supervisor(plan, deadline, opened, virtual_kernel=True))
            guard = (FIRST_FD, FIRST_FD + 1)
        runtime = self._call.runtime(network="none" if plan.network_path is None else "sandbox")
        stdio = (stream.fileno(), stream.fileno(), null)
        return await self._call.run(plan, runtime, fds, deadline, opened, guard=guard, stdio=stdio, memory=memory)

    def _prepare(self, record: Record, image: Image | None, network: str | None, memory: Path | None) -> Plan:
        """Claim what the sandbox needs, and write its bundle. Blocks."""
        gvisor = self.isolation == "gvisor"
        group = self._call.make_groups(record, virtual=gvisor)
        reach = ("--stdio", "--listen-path", AGENT_SOCKET, *(("--gvisor",) if gvisor else ()))
        plan = self._call.plan(record, image, (AGENT, *reach, "--work-dir", record.spec.directory), network)
        plan = for_virtual_kernel(plan, choose_agent_copy(self._layout, record.sandbox_id, memory), AGENT)
        group.limit(plan.cgroup)  # runsc does not change the limits of a group that exists
        self._call.write_bundle(plan, oci_bundle.virtual_config)
        return plan

    # --- connections -------------------------------------------------------------------------------------------------

    async def connect(self, sandbox_id: str, deadline: Deadline) -> ByteStream:
        """Open a stream to the agent.

        While memory is being saved this waits, because a bridge that is part of saved memory cannot be restored.
        """
        try:
            async with self._layout.exclusion.alone(sandbox_id, _BRIDGE_S):
                return await self._bridges.get(sandbox_id, self._call.runtime())
        except EngineUnavailableError:
            raise
        except EngineError as error:
            raise AgentUnreachableError(
                f"the agent of sandbox '{sandbox_id}' cannot be reached: {error.reason}"
            ) from error

    async def disconnect(self, sandbox_id: str) -> None:
        await self._bridges.leave(sandbox_id)

    # --- pausing and resuming ----------------------------------------------------------------------------------------

    async def pause(self, sandbox_id: str, deadline: Deadline) -> None:
        note = self._note(sandbox_id)
        if note.exists():
            return
        # Record it first: if this process dies in between, an unneeded resume does no harm, but a missing one would.
        note.touch()
        try:
            await self._call.ask(sandbox_id, "pause", deadline=deadline)
        except BaseException:
            note.unlink(missing_ok=True)
            raise

    async def resume(self, sandbox_id: str, deadline: Deadline) -> None:
        if self._note(sandbox_id).exists():
            await self._call.ask(sandbox_id, "resume", deadline=deadline)
            self._note(sandbox_id).unlink(missing_ok=True)

    def is_paused(self, sandbox_id: str) -> bool:
        return self._note(sandbox_id).exists() or self._layout.group(sandbox_id).is_frozen()

    async def dump(self, sandbox_id: str, target: Path, deadline: Deadline) -> None:
        await self._call.ask(sandbox_id, *_DUMP, "--image-path", str(target), deadline=deadline)
        note_agent_copy(self._layout, sandbox_id, target)
        await workers.run(workers.ENGINE, self._note_version, sandbox_id, target)

    def _note_version(self, sandbox_id: str, target: Path) -> None:
        """Record the version that the sandbox runs on. By now another one may be installed."""
        record = self._layout.records.read(sandbox_id)
        assert record is not None
        assert record.init is not None
        version = oci_runtimes.version_of(Path(f"/proc/{record.init.pid}/exe"))
        (target / VERSION_NOTE).write_text(version)

    def _note(self, sandbox_id: str) -> Path:
        return self._layout.run(sandbox_id) / _NOTE


# --- the copy of the agent that such a sandbox runs from --------------------------------------------------------------
#
# Saved memory refers to the agent's file, and processes can only continue over the same bytes. So the name of the copy
# is noted where the sandbox runs, and the note moves into the directory of its memory. The same copy is used again when
# that memory is restored, whatever agent this version of Atoll has.
#
#     <run>/agent        the name of the copy below `programs`, while the sandbox runs
#     <memory>/agent     the same, for memory on the disk
#
# Sandboxes and memory from before there were notes belong to the copy that was the newest at that time.

AGENT_NOTE = "agent"
_AGENT_MODE = 0o755
_AGENT_COPY = re.compile(r"atoll-agent-[0-9a-f]{16}-755")
_BUNDLE, _IMAGE = "config.json", "checkpoint.img"
"""Files that are as old as the start of a sandbox, and as old as its memory."""


def choose_agent_copy(layout: SandboxLayout, sandbox_id: str, memory: Path | None) -> Path:
    """Choose and note the copy for a sandbox that is about to start. `memory`: the directory of its saved memory."""
    path = _noted(layout, memory / AGENT_NOTE, memory / _IMAGE) if memory is not None else None
    path = path or layout.agent(_AGENT_MODE)
    (layout.run(sandbox_id) / AGENT_NOTE).write_text(path.name)
    return path


def note_agent_copy(layout: SandboxLayout, sandbox_id: str, memory: Path) -> None:
    """Note the copy beside the memory of a running sandbox, which has just been written to this directory."""
    run = layout.run(sandbox_id)
    path = _noted(layout, run / AGENT_NOTE, run / _BUNDLE)
    if path is not None:
        (memory / AGENT_NOTE).write_text(path.name)


def _noted(layout: SandboxLayout, note: Path, dated: Path) -> Path | None:
    try:
        name = note.read_text()
    except OSError:
        return _newest_before(layout, dated)
    path = layout.programs / name
    return path if _AGENT_COPY.fullmatch(name) and path.exists() else None


def _newest_before(layout: SandboxLayout, dated: Path) -> Path | None:
    try:
        moment = dated.stat().st_mtime_ns
        copies = {
            path: path.stat().st_mtime_ns for path in layout.programs.iterdir() if _AGENT_COPY.fullmatch(path.name)
        }
    except OSError:
        return None
    return max((path for path, made in copies.items() if made <= moment), key=copies.__getitem__, default=None)
