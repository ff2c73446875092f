"""An interactive terminal: a program on a pty inside the sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator

from atoll.command import shell_exit_code
from atoll.guest.guest import Guest
from atoll.guest.processes import ProcessExit, ProcessStream


class AsyncTerminal:
    """Iterate over it for what the program writes; `write` is what a person types."""

    def __init__(self, guest: Guest, id: str, stream: ProcessStream) -> None:
        self.id = id
        self._guest = guest
        self._stream = stream
        self._channel = guest.current_channel()
        self._exit: ProcessExit | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """What the program writes to the terminal, until it ends."""
        stream = await self._live_stream()
        async for piece in stream:
            yield piece.data
        self._exit = await stream.wait()

    async def write(self, data: str | bytes) -> None:
        """Type. Control characters do what they do on a keyboard: `\\x03` is Ctrl-C."""
        await (await self._live_stream()).send_stdin(data.encode() if isinstance(data, str) else data)

    async def resize(self, rows: int, columns: int) -> None:
        """Tell the program that the window has changed."""
        if not (0 < rows <= 1000 and 0 < columns <= 1000):
            raise ValueError(f"a terminal of {rows} rows and {columns} columns is not possible")
        (await self._live_stream()).resize(rows, columns)

    async def wait(self) -> int:
        """Wait until the program ends; its exit code."""
        async for _ in self:
            pass
        assert self._exit is not None
        return shell_exit_code(self._exit)

    async def kill(self) -> None:
        """End the program and everything it started."""
        try:
            await self._guest.processes.kill(self.id.encode())
        except (ProcessLookupError, FileNotFoundError):
            return

    async def _live_stream(self) -> ProcessStream:
        # Another event loop, or a connection that was lost.
        if self._guest.current_channel() is not self._channel:
            first, second, third = self._stream.offsets
            self._stream = await self._guest.processes.attach(self.id.encode(), (first, second, third))
            self._channel = self._guest.current_channel()
        return self._stream
