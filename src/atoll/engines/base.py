"""The contract between Atoll and whatever makes sandboxes."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from atoll.errors import UnsupportedError
from atoll.model import Capability, Cause, Handle, Observation, SandboxSpec, Stats

ByteStream = socket.socket
"""A connected, non-blocking stream socket to a sandbox's agent. An engine without one bridges a socket pair."""


@runtime_checkable
class Engine(Protocol):
    """Makes and destroys sandboxes, and hands over a byte stream to the agent inside. Nothing else.

    Everything a user does inside a sandbox is spoken over the stream, so an engine knows nothing of commands or files.

    All methods may be called concurrently and for different sandboxes in any order. Each has a deadline of its own and
    raises only errors of `atoll.errors`. Cancelling a call leaves nothing half made: a cancelled `create` has removed
    what it made before the cancellation is seen by the caller. The contract is checked by `atoll.conformance`.
    """

    name: str
    capabilities: frozenset[Capability]

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> Handle:
        """Make a sandbox whose agent can be reached. A failure leaves nothing behind.

        Raises UnsupportedError for a control it cannot enforce, ImageNotFoundError, EngineUnavailableError when
        something is missing on this machine, EngineError otherwise.
        """

    async def connect(self, handle: Handle) -> ByteStream:
        """A new stream to the agent; again and again, also from another process than the one that created it.

        Raises SandboxGoneError with the cause when the sandbox has ended, AgentUnreachableError when it does not
        answer.
        """

    async def inspect(self, handle: Handle) -> Observation:
        """The state, and the cause when it is dead, which is no error. MISSING for a sandbox that was deleted."""

    async def list(self) -> list[Handle]:
        """Everything of this installation that exists, alive or dead, also what an earlier process made."""

    async def stats(self, handle: Handle) -> Stats: ...

    async def delete(self, handle: Handle) -> None:
        """End it and remove every trace. Always legal, always safe to repeat; when it returns nothing is left."""

    async def aclose(self) -> None:
        """Let go of what this object holds (not of the sandboxes). May be repeated."""


@runtime_checkable
class Pausable(Protocol):
    """An engine that can stop all of a sandbox's processes and let them go on. Needs `Capability.PAUSE`."""

    async def pause(self, handle: Handle) -> None: ...

    async def resume(self, handle: Handle) -> None: ...


@runtime_checkable
class Collecting(Protocol):
    """An engine that can remove what nobody owns any more: the remains of calls that were killed in the middle."""

    async def gc(self) -> Sequence[str]:
        """What was removed, each with a word on why. Touches nothing that is not of this installation."""


@runtime_checkable
class Finding(Protocol):
    """An engine that can look for one sandbox, which is quicker than listing all, or finds more than it lists."""

    async def find(self, sandbox_id: str) -> Handle | None: ...


_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


@dataclass(frozen=True, slots=True)
class LimitEvents:
    """How often a sandbox's limits were hit since it was made."""

    oom_kills: int = 0
    pids_refused: int = 0
    disk_full: bool = False
    """Right now: nobody counts the writes that were refused."""

    def cause_since(self, before: LimitEvents, said: str) -> Cause | None:
        """The limit that a failed command hit since then, if any. `said` is what it wrote to standard error: a disk
        that was full already is the cause only if the command complains of it."""
        if self.oom_kills > before.oom_kills:
            return Cause.OUT_OF_MEMORY
        if self.pids_refused > before.pids_refused:
            return Cause.PIDS
        if self.disk_full and (not before.disk_full or any(text in said for text in _DISK_FULL)):
            return Cause.DISK_FULL
        return None


@runtime_checkable
class LimitReporting(Protocol):
    """An engine that knows whether a limit was hit: compared before and after a command that failed, it tells why.

    What ends the sandbox as a whole is told by `inspect`.
    """

    async def limit_events(self, handle: Handle) -> LimitEvents:
        """Asked around every command of a sandbox with limits, so it has to be quick. Of one that is gone: nothing."""


def refuse_unsupported(engine: str, capabilities: frozenset[Capability], spec: SandboxSpec) -> None:
    """Raise UnsupportedError if the spec asks for a control that is not among the capabilities."""
    limits = spec.limits
    asked = {
        Capability.MEMORY: limits.memory_bytes,
        Capability.CPUS: limits.cpus,
        Capability.PIDS: limits.pids,
        Capability.DISK: limits.disk_bytes,
        Capability.INODES: limits.inodes,
        Capability.OPEN_FILES: limits.open_files,
        Capability.VOLUMES: spec.volumes or None,
    }
    for capability, value in asked.items():
        if value is not None and capability not in capabilities:
            raise UnsupportedError(
                f"engine '{engine}' cannot enforce {capability.value} here",
                hint="Leave it out, or choose another engine: 'atoll doctor' lists what each one can enforce.",
            )
