"""A command that runs in the background: follow it, feed it, wait for it, kill it, find it again."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from atoll import workers
from atoll.errors import AgentUnreachableError
from atoll.guest.guest import Guest
from atoll.guest.processes import Capture, FollowedProcess, ProcessExit
from atoll.model import Cause, ExecutionResult

DEFAULT_OUTPUT_BYTES = 8 << 20
OutputName = Literal["stdout", "stderr"]
_TIMEOUT_CODE = 124
_SIGNAL_BASE = 128
_RECONNECTS = 5
_LONG_BYTES = 1 << 20
"""Outputs that are longer together are joined in a thread."""


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of what a command wrote, as it came."""

    name: OutputName
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


def new_command_id() -> str:
    return secrets.token_hex(8)


def shell_exit_code(exit: ProcessExit) -> int:
    """One number for how a process ended, as a shell would say it."""
    if exit.cause is Cause.TIMEOUT:
        return _TIMEOUT_CODE
    if exit.exit_code is not None:
        return exit.exit_code
    return _SIGNAL_BASE + (exit.signal or 9)


async def execution_result(exit: ProcessExit, stdout: Capture, stderr: Capture) -> ExecutionResult:
    """Return the result of a command that has ended."""
    if stdout.kept + stderr.kept > _LONG_BYTES:
        out, err = await workers.run(workers.TRANSFER, lambda: (stdout.value(), stderr.value()))
    else:
        out, err = stdout.value(), stderr.value()
    return ExecutionResult.captured(
        out,
        err,
        exit_code=shell_exit_code(exit),
        duration_s=exit.duration_s,
        cause=exit.cause,
        truncated=stdout.truncated or stderr.truncated,
        cpu_s=exit.cpu_s,
        max_rss_bytes=exit.max_rss_bytes,
    )


class AsyncCommand:
    """A command of a sandbox, by its id. Iterate over it to get its output as it comes.

    The command belongs to the sandbox, not to this object: it goes on when the connection is lost or the program that
    started it dies, and its output is kept for whoever attaches next. Lost connections are made again without a gap.
    """

    def __init__(
        self,
        guest: Guest,
        id: str,
        process: FollowedProcess,
        limit_bytes: int,
        explain: Callable[[], Awaitable[None]],
        asked: tuple[int, int] | None = None,
    ) -> None:
        self.id = id
        self.is_kept = False
        """Whether the sandbox remembers the command after its end was read, for somebody else who may ask. A server
        sets it."""
        self._guest = guest
        self._process = process
        self._connection = guest.current_connection()
        self._explain = explain
        self._captures = (Capture(limit_bytes), Capture(limit_bytes))
        self._exit: ProcessExit | None = None
        self._dropped = process.dropped
        if asked is not None:
            self._show_dropped(asked)

    @property
    def pid(self) -> int:
        """Its number inside the sandbox."""
        return self._process.pid

    @property
    def offsets(self) -> tuple[int, int]:
        """How far stdout and stderr were read: attach from here to go on."""
        offsets = self._process.offsets
        return offsets[0], offsets[1]

    @property
    def dropped_bytes(self) -> int:
        """How much of the output was no longer kept when this object attached to it."""
        return self._dropped

    @property
    def ended(self) -> bool:
        """Whether this object has read the output to its end."""
        return self._exit is not None

    async def __aiter__(self) -> AsyncIterator[Output]:
        """The output, piece by piece, until the command ends."""
        tries = 0
        while self._exit is None:
            process = await self._live_process()
            try:
                async for piece in process:
                    tries = 0
                    if piece.channel <= 2:
                        self._captures[piece.channel - 1].add(memoryview(piece.data))
                        yield Output("stdout" if piece.channel == 1 else "stderr", piece.data)
                self._exit = await process.wait()
            except AgentUnreachableError:
                tries += 1
                if tries > _RECONNECTS:
                    raise
                await self._reattach()
        if not self.is_kept:
            # The command is over and all was delivered: the sandbox need not remember it.
            with contextlib.suppress(OSError, AgentUnreachableError):
                self._guest.processes.release_soon(self.id.encode())

    async def wait(self) -> ExecutionResult:
        """Wait for its end. The result holds the output that this object has read."""
        async for _ in self:
            pass
        assert self._exit is not None
        return await execution_result(self._exit, *self._captures)

    async def kill(self, signal: int = 9) -> None:
        """Send a signal. With 9 (the default) everything the command started dies too, and is gone on return."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            await self._guest.processes.kill(self.id.encode(), signal)

    async def send_stdin(self, data: str | bytes) -> None:
        """Write to its standard input (start it with `stdin=True`). BrokenPipeError once it has ended."""
        process = await self._live_process()
        await process.send_stdin(data.encode() if isinstance(data, str) else data)

    async def close_stdin(self) -> None:
        """Tell it that there is no more input."""
        await (await self._live_process()).close_stdin()

    async def detach(self) -> None:
        """Stop following it. It goes on; `attach` finds it again."""
        self._process.detach()

    async def _live_process(self) -> FollowedProcess:
        # Another event loop, or a connection that was lost.
        if self._guest.current_connection() is not None:
            await self._guest.connection()  # which says so if the sandbox is paused
        if self._guest.current_connection() is not self._connection:
            await self._reattach()
        return self._process

    async def _reattach(self) -> None:
        first, second, third = self._process.offsets
        for tries_left in range(_RECONNECTS, -1, -1):
            await self._explain()
            try:
                self._process = await self._guest.processes.attach(self.id.encode(), (first, second, third))
                break
            except AgentUnreachableError:  # lost again meanwhile
                if not tries_left:
                    raise
        self._dropped += self._process.dropped
        self._show_dropped((first, second))
        self._connection = self._guest.current_connection()

    def _show_dropped(self, asked: tuple[int, int]) -> None:
        """Right after attaching: what lies between the offsets asked for and where the output starts is missing."""
        for capture, offset, start in zip(self._captures, asked, self.offsets, strict=True):
            capture.miss(start - offset)
