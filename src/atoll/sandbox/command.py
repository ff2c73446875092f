"""Background commands: follow one, send it input, wait for it, kill it, attach to it again."""

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
from atoll.tracing import span

DEFAULT_OUTPUT_BYTES = 8 << 20
OutputName = Literal["stdout", "stderr"]
_TIMEOUT_CODE = 124
_SIGNAL_BASE = 128
_RECONNECTS = 5
_LONG_BYTES = 1 << 20
"""Outputs that are longer together are joined in a thread."""


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a command's output, exactly as it arrived."""

    name: OutputName
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


def new_command_id() -> str:
    return secrets.token_hex(8)


def shell_exit_code(exit: ProcessExit) -> int:
    """Return the exit code that a shell would report: 124 after a timeout, 128 plus the number of a signal."""
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
    """A command of a sandbox. Iterate over it to read its output as it arrives.

    The command belongs to the sandbox, not to this object: it continues when the connection is lost or the program that
    started it dies, and its output is kept for the next program that attaches. Lost connections are reopened without a
    gap in the output.
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
        """Whether the sandbox keeps the command and its output after its end has been read. A server sets this, because
        another client may attach."""
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
        """The process id inside the sandbox."""
        return self._process.pid

    @property
    def offsets(self) -> tuple[int, int]:
        """How many bytes of stdout and stderr have been read; attach with these offsets to continue."""
        offsets = self._process.offsets
        return offsets[0], offsets[1]

    @property
    def dropped_bytes(self) -> int:
        """How many bytes of output had already been discarded when this object attached."""
        return self._dropped

    @property
    def ended(self) -> bool:
        """Whether this object has read the output to its end."""
        return self._exit is not None

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield the output, piece by piece, until the command ends."""
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
            # The command has ended and all of its output was delivered, so the sandbox can forget it.
            with contextlib.suppress(OSError, AgentUnreachableError):
                self._guest.processes.release_soon(self.id.encode())

    async def wait(self) -> ExecutionResult:
        """Wait for the command to end. The result holds the output that this object has read."""
        with span("command.wait", command_id=self.id) as current:
            async for _ in self:
                pass
            assert self._exit is not None
            result = await execution_result(self._exit, *self._captures)
            current.set(exit_code=result.exit_code, cause=result.cause)
            return result

    async def kill(self, signal: int = 9) -> None:
        """Send a signal. Signal 9 (the default) also kills everything the command started, before `kill` returns."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            await self._guest.processes.kill(self.id.encode(), signal)

    async def send_stdin(self, data: str | bytes) -> None:
        """Write to the command's standard input, which needs `start(…, stdin=True)`.

        Raises BrokenPipeError once the command has ended.
        """
        process = await self._live_process()
        await process.send_stdin(data.encode() if isinstance(data, str) else data)

    async def close_stdin(self) -> None:
        """Close the command's standard input, so that it reads end-of-file."""
        await (await self._live_process()).close_stdin()

    async def detach(self) -> None:
        """Stop following the command, which continues to run. `command` on the sandbox attaches to it again."""
        self._process.detach()

    async def _live_process(self) -> FollowedProcess:
        # Reattach if the connection was lost or belongs to another event loop.
        if self._guest.current_connection() is not None:
            await self._guest.connection()  # raises SandboxPausedError if the sandbox is paused
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
        """Record in the captures, right after attaching, the bytes missing between the requested and actual offsets."""
        for capture, offset, start in zip(self._captures, asked, self.offsets, strict=True):
            capture.miss(start - offset)
