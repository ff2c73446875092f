"""Runs the launcher `atoll-native`: starts its process, sends it the operations, and reads its report.

The process is started before a sandbox is wanted, because its start and the operations that are the same for all
sandboxes take as long as everything else. Until it has received all operations, closing its socket ends it, and nothing
has been made.
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
"""How long after a sandbox was made the next launcher is started. Starting it at once would take CPU time from the
first command of the new sandbox."""


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
    """The operations that the process executes before it receives the rest."""
    said: bytes = b""
    """The part of its report that has been received."""
    ended: bool = False
    """Whether the report is complete."""

    @classmethod
    def start(cls, program: str, early: Early, fds: Sequence[int] = ()) -> LauncherProcess:
        """Start a process and send it the early operations. It gets `fds` as descriptors 4 and up."""
        ours, theirs = socket.socketpair()
        try:
            pid = run_program.spawn((program,), (theirs.fileno(), *fds))
        except OSError as error:
            ours.close()
            raise EngineUnavailableError(f"cannot run '{program}': {error.strerror}") from error
        finally:
            theirs.close()
        with suppress(BrokenPipeError):  # reading the report will show that the process has ended
            ours.send(_frame(early.host) + _frame(early.inside))
        return cls(pid, ours, early)

    def tell(self, lists: Sequence[bytes], fds: Sequence[int], deadline: Deadline) -> None:
        """Send the remaining operations and descriptors. Blocks only if the process does not read them, and raises
        EngineError at the deadline."""
        content = memoryview(b"".join(map(_frame, lists)))
        self.channel.settimeout(max(0.001, deadline.left()))
        try:
            content = content[socket.send_fds(self.channel, [content], list(fds)) :]
            self.channel.sendall(content)
        except TimeoutError:
            raise EngineError("the launcher does not read its input", hint="The machine may be overloaded.") from None
        except (BrokenPipeError, ConnectionResetError):
            pass  # the process has ended, and its report may say why

    async def wait_for_first(self, deadline: Deadline) -> int | None:
        """Wait until `first` is known, and return it. None: there is no first process, and `outcome` raises the
        reason."""
        self._read()
        while not self.ended and self.first() is None:
            if not await readable({self.channel.fileno()}, deadline):
                return None
            self._read()
        return self.first()

    def first(self) -> int | None:
        """Return the id of the sandbox's first process, or None if the launcher has not reported it yet."""
        self._read()
        match self.said.partition(b"\n")[0].split():
            case [b"first", pid] if pid.isdigit() and b"\n" in self.said:
                return int(pid)
        return None

    async def outcome(self, caller: socket.socket, deadline: Deadline) -> int:
        """Wait until the agent has answered on the socket `caller`. Return the id of the first process, which has
        become the agent.

        Raises EngineError or ImageError with the operation that failed.
        """
        unheard = False
        while not (self.ended and unheard):
            watched = {fd for fd, over in ((self.channel.fileno(), self.ended), (caller.fileno(), unheard)) if not over}
            ready = await readable(watched, deadline)
            if not ready:
                raise EngineError("the launcher did not end in time", hint="The machine may be overloaded.")
            if caller.fileno() in ready:
                if agent_socket.was_answered(caller):
                    break
                unheard = True  # no agent will answer; the launcher reports why, or just ends
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
        """Return whether the process has ended, and reap it if it has."""
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # other code in this program has waited for it
            return True

    def close(self) -> None:
        """Close the socket and kill the process. It would end by itself, but this is quicker."""
        self.channel.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class LauncherPool:
    """The launcher processes of one engine. One is kept ready, so that the next sandbox need not wait for its start.

    Use it only in the thread of the event loop.
    """

    def __init__(self) -> None:
        self.fds: tuple[int, ...] = ()
        """The descriptors that every launcher gets."""
        self._spare: LauncherProcess | None = None
        self._ending: list[LauncherProcess] = []
        self._used = 0
        self._early: Early | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of `_soon`. An engine may outlive an event loop and be used from the next one."""

    def take(self, program: str) -> LauncherProcess | None:
        """Return a started launcher, or None if the early operations are not known yet."""
        spare, self._spare = self._spare, None
        if spare is not None and not spare.has_ended():
            return spare
        if spare is not None:
            spare.channel.close()
        return LauncherProcess.start(program, self._early, self.fds) if self._early is not None else None

    def fitting(self, taken: LauncherProcess | None, program: str, early: Early) -> LauncherProcess:
        """Return the launcher that was taken if it has executed these early operations, otherwise another one."""
        self._early = early
        self._used += 1
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
        """Start the next launcher after a short delay, or when a sandbox is deleted before that (`prepare_now`)."""
        loop = asyncio.get_running_loop()
        if self._spare is None and (self._soon is None or self._loop is not loop):
            self._loop = loop
            self._soon = loop.call_later(_SOON_S, self._prepare, program)

    def prepare_now(self, program: str) -> None:
        """Start the next launcher, unless only one was ever used: a program that deletes its only sandbox is mostly
        about to end, and would wait for the end of this launcher too."""
        if self._used == 1:
            return
        if self._soon is not None:
            self._soon.cancel()
        self._prepare(program)

    def _prepare(self, program: str) -> None:
        self._soon = None
        if self._spare is None and self._early is not None:
            with suppress(EngineUnavailableError, OSError):  # making the next sandbox reports why
                self._spare = LauncherProcess.start(program, self._early, self.fds)

    def close(self) -> None:
        self._early = None  # prepare nothing more until another sandbox is made
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
    """Return the reason of a failure from a report."""
    return _failure(said).reason.removeprefix(f"{_NOT_MADE}: ")


def _failure(said: bytes) -> SandboxError:
    """Return the error that the last line of a report stands for."""
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
        "the launcher ended without a report", hint="'atoll doctor' checks what is needed on this machine."
    )
