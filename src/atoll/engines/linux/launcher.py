"""The interfaces of launchers, the one part in which the Linux engines differ.

A `LinuxEngine` keeps records, layers, images, saved states and control groups, and decides what a sandbox consists of.
A `Launcher` then starts the processes. The engine finds the launcher with its `Launchers`: for a new sandbox by its
spec, for an existing one by the name in its record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from atoll.engines.contract import ByteStream
from atoll.engines.host import agent_socket
from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.images import Image
from atoll.model import Capability, SandboxSpec
from atoll.waiting import Deadline

Isolation = Literal["namespaces", "gvisor", "vm"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Callbacks for a launcher to call while it is still making a sandbox, so that the engine can work meanwhile."""

    network_exists: Callable[[int], None]
    """Reports the id of a process that may become the sandbox. Its network namespace would then be the sandbox's, so it
    can be connected already."""
    first_process: Callable[[int], bool]
    """Reports the id of the sandbox's first process, which is then recorded. Returns False if there is no such process
    any more."""


class MemorySaving(Protocol):
    """A launcher that can save the memory of a sandbox, and can start a sandbox from saved memory."""

    async def disconnect(self, sandbox_id: str) -> None:
        """Close idle connections to the agent. Raises EngineError if another program has one, because memory with an
        open connection could not be restored."""

    async def dump(self, sandbox_id: str, target: Path, deadline: Deadline) -> None:
        """Write the memory of a paused sandbox to the directory `target`. The sandbox stays paused."""


class Launcher(Protocol):
    """Starts the processes of sandboxes, connects to their agents, and pauses and resumes them.

    Everything that a launcher makes is named after the sandbox or is in its control groups, so that the teardown can
    find it without the launcher: processes in `layout.group` and `layout.starting`, files in `layout.run`. A launcher
    therefore removes nothing of a sandbox that it failed to start.

    All methods may be called concurrently for different sandboxes. Callers of `start`, `pause` and `resume` must hold
    the lock of the sandbox.
    """

    name: str
    """The launcher's name in records."""
    isolation: Isolation
    handle_details: Mapping[str, str]
    """The details, besides limits, in the handles of its sandboxes. `Launchers.of_handle` finds the launcher by
    them."""
    connects_late: bool
    """Whether a running sandbox can be connected to a network. It can if it uses the network stack of the host's
    kernel. Otherwise `start` connects the sandbox before its own network stack reads its links."""
    memory: MemorySaving | None

    def check(self) -> None:
        """Raise EngineUnavailableError if no sandbox can be started now. May be repeated at any time."""

    async def start(self, record: Record, image: Image | None, progress: Progress, deadline: Deadline) -> ProcessRef:
        """Claim what the sandbox needs (ids, control groups, a layer) and start it. Return its first process once the
        agent inside can be reached. If `record.memory` is set, its processes continue from that saved memory.

        The record has been written, and the sandbox has neither processes nor a run directory: it is new or has been
        stopped. Raises SpecError, ImageError or EngineError. After a failure or a cancellation, the caller runs the
        teardown at once, which removes whatever was made. Nothing more may appear after that.
        """

    async def connect(self, sandbox_id: str, deadline: Deadline) -> ByteStream:
        """Open a new stream to the agent. Raises OSError if the agent does not answer, perhaps because the sandbox has
        ended, and AgentUnreachableError if the means to reach it fail."""

    async def pause(self, sandbox_id: str, deadline: Deadline) -> None:
        """Stop all processes. When this returns, nothing inside runs. May be repeated. After an error or a
        cancellation the sandbox goes on, or can be made to go on with `resume`."""

    async def resume(self, sandbox_id: str, deadline: Deadline) -> None:
        """Let the processes continue. May be repeated, also for a sandbox that was never paused."""

    def is_paused(self, sandbox_id: str) -> bool: ...


class SharedKernelLauncher:
    """The common part of launchers whose sandboxes use the host's kernel: everything in `Launcher` except `start`.

    The agent serves a socket in the sandbox's run directory, and the freezer of the control group pauses the sandbox.
    """

    isolation: Isolation = "namespaces"
    connects_late = True
    memory: MemorySaving | None = None

    def __init__(self, layout: SandboxLayout) -> None:
        self._layout = layout

    async def connect(self, sandbox_id: str, deadline: Deadline) -> ByteStream:
        return await agent_socket.connect(self._layout.socket(sandbox_id), deadline)

    async def pause(self, sandbox_id: str, deadline: Deadline) -> None:
        await self._layout.group(sandbox_id).freeze(deadline)

    async def resume(self, sandbox_id: str, deadline: Deadline) -> None:
        self._layout.group(sandbox_id).thaw()

    def is_paused(self, sandbox_id: str) -> bool:
        return self._layout.group(sandbox_id).is_frozen()


class Launchers(Protocol):
    """The launchers of one engine."""

    isolation: Isolation
    """The isolation level of a sandbox whose spec names none."""

    def choose(self, spec: SandboxSpec) -> Launcher:
        """Return the launcher for a new sandbox. Raises UnsupportedError or EngineUnavailableError if the isolation
        level is not available. It is never replaced by another."""

    def named(self, name: str) -> Launcher:
        """Return the launcher of this name, whether or not its programs are still installed. Raises
        EngineUnavailableError if this engine has no launcher of that name."""

    def of_handle(self, details: Mapping[str, str]) -> Launcher:
        """Return the launcher that the details of a handle name."""

    def has(self, name: str) -> bool: ...

    def lacks(self, isolation: Isolation) -> frozenset[Capability]:
        """Return the capabilities that no sandbox of this isolation level can have."""

    def levels(self) -> tuple[Isolation, ...]:
        """Return the isolation levels whose programs are installed, after that of a sandbox whose spec names none."""

    def forget(self, sandbox_id: str) -> None:
        """Close the connections that were prepared for a sandbox, which is stopped or gone. May be repeated, also for
        unknown sandboxes."""

    def rest(self) -> None:
        """Prepare for the next sandbox. Called after a sandbox was deleted, when no caller is waiting."""

    async def aclose(self) -> None:
        """Release prepared processes and connections. Sandboxes go on. May be repeated, and the launchers can be used
        again afterwards."""
