"""What starts sandboxes: the one part in which the engines on Linux differ.

A `LinuxEngine` keeps records, layers, images, saved states and control groups, and decides what a sandbox is. It hands
the rest to a `Launcher`, which makes processes of it. The engine asks its `Launchers` which one that is: for a new
sandbox by its spec, for one that exists by the name in its record.
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
from atoll.engines.linux.record import Record
from atoll.images import Image
from atoll.model import Capability, SandboxSpec
from atoll.waiting import Deadline

Isolation = Literal["namespaces", "gvisor", "vm"]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a launcher may report while it still makes a sandbox, to save the time of doing both in turn."""

    network_exists: Callable[[int], None]
    """This process may become the sandbox, and then its network namespace is the sandbox's: it can be connected."""
    first_process: Callable[[int], bool]
    """This is the sandbox's first process; it is written down. False: there is no such process any more."""


class MemorySaving(Protocol):
    """A launcher's power to write down what runs in a sandbox, and to start a sandbox that goes on with it."""

    async def disconnect(self, sandbox_id: str) -> None:
        """Close the connections to the agent that nobody uses. Raises EngineError if somebody else has one: memory
        with an open connection cannot be restored."""

    async def dump(self, sandbox_id: str, target: Path, deadline: Deadline) -> None:
        """Write the memory of a paused sandbox to this directory; the sandbox stays paused."""


class Launcher(Protocol):
    """Starts the processes of sandboxes, reaches them, and stops and continues them.

    Everything that a launcher makes bears the sandbox's name or belongs to its control groups, so that the teardown
    finds it without a launcher: processes in `layout.group` and `layout.starting`, files in `layout.run`. A launcher
    therefore removes nothing of a sandbox that it failed to start.

    All methods may be called concurrently for different sandboxes. Whoever calls `start`, `pause` and `resume` has the
    lock of the sandbox.
    """

    name: str
    """What records call it."""
    isolation: Isolation
    handle_details: Mapping[str, str]
    """What the handles of its sandboxes carry besides their limits, so that `Launchers.of_handle` finds it again."""
    connects_late: bool
    """Whether a sandbox that runs can be connected to a network: its network stack is this machine's. Otherwise `start`
    connects the sandbox before that stack reads its links."""
    memory: MemorySaving | None

    def check(self) -> None:
        """Raises EngineUnavailableError if no sandbox can be started now. May be repeated at any time."""

    async def start(self, record: Record, image: Image | None, progress: Progress, deadline: Deadline) -> ProcessRef:
        """Claim what the sandbox needs (ids, control groups, a layer), and start it. Returns the first process once
        the agent inside can be reached. With `record.memory` its processes go on as they were saved.

        The record is written, and the sandbox has neither processes nor a run directory: it is new, or was stopped.
        Raises SpecError, ImageError or EngineError. After a failure or a cancellation whatever was made is left to the
        teardown, which the caller begins at once; nothing of it may appear later.
        """

    async def connect(self, sandbox_id: str, deadline: Deadline) -> ByteStream:
        """A new stream to the agent. Raises OSError if it does not answer, which may be because the sandbox has ended;
        AgentUnreachableError if the way to it is broken."""

    async def pause(self, sandbox_id: str, deadline: Deadline) -> None:
        """When this returns, nothing inside runs. May be repeated. After an error or a cancellation the sandbox goes
        on, or `resume` makes it go on."""

    async def resume(self, sandbox_id: str, deadline: Deadline) -> None:
        """May be repeated, also for a sandbox that was never paused."""

    def is_paused(self, sandbox_id: str) -> bool: ...


class SharedKernelLauncher:
    """A `Launcher` whose sandboxes run on this machine's own kernel, but for how it starts them.

    The agent serves a socket in the sandbox's run directory, and the freezer of the control group stops the sandbox.
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
    """What a spec gets that asks for none."""

    def choose(self, spec: SandboxSpec) -> Launcher:
        """Raises UnsupportedError or EngineUnavailableError: an isolation that is not there is refused, never replaced
        by another."""

    def named(self, name: str) -> Launcher:
        """The one that a record names, whether or not its programs are still installed. Raises EngineUnavailableError
        for a name that none of this engine has."""

    def of_handle(self, details: Mapping[str, str]) -> Launcher:
        """The one that the details of a handle name."""

    def has(self, name: str) -> bool: ...

    def lacks(self, isolation: Isolation) -> frozenset[Capability]:
        """What no sandbox of this isolation can have."""

    def forget(self, sandbox_id: str) -> None:
        """The sandbox is stopped or gone: close connections that were prepared for it. May be repeated, also for
        unknown sandboxes."""

    def rest(self) -> None:
        """A sandbox is gone and nobody waits: the moment to prepare for the next."""

    async def aclose(self) -> None:
        """Let go of prepared processes and connections; sandboxes go on. May be repeated, and used again afterwards."""
