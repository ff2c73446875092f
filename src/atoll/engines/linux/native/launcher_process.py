"""The launcher's process, `atoll-native`: started, told what to make, asked how it went.

It is started before it is known what to make, because its start and what is the same for all sandboxes take as long
as everything else. As long as it has not been told all, closing its socket ends it and nothing was made.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll import agent_binary
from atoll.engines.host import agent_socket, run_program
from atoll.engines.linux import launcher_protocol
from atoll.engines.linux.launcher_protocol import Early
from atoll.errors import EngineError, EngineUnavailableError, ImageError, SandboxError
from atoll.printable import printable
from atoll.waiting import Deadline, readable

_MAX_REPORT = 2048
_NOT_MADE = "the sandbox could not be made"
_FAILURES = (b"failed ", b"killed ")
_SOON_S = 0.025
"""After a sandbox was made the next launcher is started, but not before its maker had a chance to use it: the start of
a program takes time from whatever the sandbox does first."""


def program() -> Path:
    path = agent_binary.path().with_name("atoll-native")
    if not os.access(path, os.X_OK):
        raise EngineUnavailableError(f"there is no program at '{path}'", hint="In a working copy run 'make agent'.")
    return path


@dataclass(slots=True)
class LauncherProcess:
    pid: int
    channel: socket.socket
    early: Early
    """What it makes before it is told the rest."""
    said: bytes = b""
    """Its report, as far as it has come."""
    ended: bool = False
    """Nothing more will come."""

    @classmethod
    def start(cls, program: str, early: Early, fds: Sequence[int] = ()) -> LauncherProcess:
        """It finds `fds` from 4 on."""
        ours, theirs = socket.socketpair()
        try:
            pid = run_program.spawn((program,), (theirs.fileno(), *fds))
        except OSError as error:
            ours.close()
            raise EngineUnavailableError(f"cannot run '{program}': {error.strerror}") from error
        finally:
            theirs.close()
        with suppress(BrokenPipeError):  # it is seen when it is asked for its report
            ours.send(_frame(early.host) + _frame(early.inside))
        return cls(pid, ours, early)

    def tell(self, lists: Sequence[bytes], fds: Sequence[int], deadline: Deadline) -> None:
        """All that it needs to know. Blocks only if it does not read."""
        content = memoryview(b"".join(map(_frame, lists)))
        self.channel.settimeout(max(0.001, deadline.left()))
        try:
            content = content[socket.send_fds(self.channel, [content], list(fds)) :]
            self.channel.sendall(content)
        except TimeoutError:
            raise EngineError("the launcher does not listen", hint="The machine may be overloaded.") from None
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended, and perhaps it said why

    async def wait_for_first(self, deadline: Deadline) -> int | None:
        """As `first`, but not before it is known. None: there is none, and `outcome` says why."""
        self._read()
        while not self.ended and self.first() is None:
            if not await readable({self.channel.fileno()}, deadline):
                return None
            self._read()
        return self.first()

    def first(self) -> int | None:
        """The process number of the sandbox's first process, as soon as the launcher has said it."""
        self._read()
        match self.said.partition(b"\n")[0].split():
            case [b"first", pid] if pid.isdigit() and b"\n" in self.said:
                return int(pid)
        return None

    async def outcome(self, caller: socket.socket, deadline: Deadline) -> int:
        """Wait until the agent has answered the caller. The number of the first process, which became the agent.

        Raises EngineError or ImageError with the step that failed."""
        unheard = False
        while not (self.ended and unheard):
            watched = {fd for fd, over in ((self.channel.fileno(), self.ended), (caller.fileno(), unheard)) if not over}
            ready = await readable(watched, deadline)
            if not ready:
                raise EngineError("the launcher did not end in time", hint="The machine may be overloaded.")
            if caller.fileno() in ready:
                if agent_socket.was_answered(caller):
                    break
                unheard = True  # nobody will answer: the launcher says why, or just ends
            self._read()
            if (self.ended and not self.said.endswith(b"ok")) or self.said.rpartition(b"\n")[2].startswith(_FAILURES):
                raise _failure(self.said)
        first = self.first()
        if unheard or first is None:
            raise EngineError("the sandbox ended while it was being made")
        return first

    def _read(self) -> None:
        self.channel.setblocking(False)
        try:
            while not self.ended:
                piece = self.channel.recv(_MAX_REPORT)
                self.said += piece
                self.ended = not piece or len(self.said) >= _MAX_REPORT
        except BlockingIOError:
            return
        except ConnectionResetError:
            self.ended = True

    def has_ended(self) -> bool:
        """And is reaped, if so."""
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # somebody else in this program waited for it
            return True

    def close(self) -> None:
        """It ends by itself when nobody is there to listen, but nobody should have to wait for that."""
        self.channel.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class LauncherPool:
    """Those of one engine. One is kept waiting, so that the next sandbox need not wait for its start.

    Only for use in the thread of the event loop."""

    def __init__(self) -> None:
        self.fds: tuple[int, ...] = ()
        """What every launcher gets."""
        self._spare: LauncherProcess | None = None
        self._ending: list[LauncherProcess] = []
        self._early: Early | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """That of `_soon`: an engine may outlive an event loop, and is used from the next one."""

    def take(self, program: str) -> LauncherProcess | None:
        """One that has been started; None as long as it is not known what plans begin with."""
        spare, self._spare = self._spare, None
        if spare is not None and not spare.has_ended():
            return spare
        if spare is not None:
            spare.channel.close()
        return LauncherProcess.start(program, self._early, self.fds) if self._early is not None else None

    def fitting(self, taken: LauncherProcess | None, program: str, early: Early) -> LauncherProcess:
        """The one taken, if it makes what this plan asks for, else another."""
        self._early = early
        if taken is not None and taken.early == early:
            return taken
        if taken is not None:
            self.put_away(taken)
        return LauncherProcess.start(program, early, self.fds)

    def put_away(self, launcher: LauncherProcess) -> None:
        launcher.close()
        self._ending.append(launcher)
        self._ending = [each for each in self._ending if not each.has_ended()]

    def prepare_soon(self, program: str) -> None:
        """In a while; a sandbox that was deleted is a good moment for the next (`prepare_now`)."""
        loop = asyncio.get_running_loop()
        if self._spare is None and (self._soon is None or self._loop is not loop):
            self._loop = loop
            self._soon = loop.call_later(_SOON_S, self._prepare, program)

    def prepare_now(self, program: str) -> None:
        if self._soon is not None:
            self._soon.cancel()
        self._prepare(program)

    def _prepare(self, program: str) -> None:
        self._soon = None
        if self._spare is None and self._early is not None:
            with suppress(EngineUnavailableError, OSError):  # the next sandbox finds out why
                self._spare = LauncherProcess.start(program, self._early, self.fds)

    def close(self) -> None:
        self._early = None  # nothing is prepared any more until another sandbox is made
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._spare is not None:
            self._spare.close()
            self._ending.append(self._spare)
            self._spare = None
        for launcher in self._ending:
            with suppress(ChildProcessError):
                os.waitpid(launcher.pid, 0)  # it was killed
        self._ending = []


def _frame(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


def understood(said: bytes) -> str:
    """Why it failed, in words."""
    return _failure(said).reason.removeprefix(f"{_NOT_MADE}: ")


def _failure(said: bytes) -> SandboxError:
    """What the last line of a report means."""
    text = printable(said.rpartition(b"\n")[2], instead=" ")
    if (failed := launcher_protocol.failure(text)) is not None:
        kind = ImageError if failed.is_of_the_image else EngineError
        return kind(f"{_NOT_MADE}: {failed}")
    if text.startswith("killed "):
        return EngineError(
            f"the sandbox's first process was killed while it was being made ({text.removeprefix('killed ')})",
            hint="Its memory limit may be too small.",
        )
    return EngineError(
        "the launcher ended without a word", hint="'atoll doctor' checks what is needed on this machine."
    )
