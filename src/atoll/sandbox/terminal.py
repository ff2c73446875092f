"""An interactive terminal: a program on a pty inside the sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator

from atoll.guest.guest import Guest
from atoll.guest.processes import FollowedProcess, ProcessExit
from atoll.sandbox.command import shell_exit_code


class AsyncTerminal:
    """A program on a terminal. Iterate over it to read what the program writes; `write` types."""

    def __init__(self, guest: Guest, id: str, process: FollowedProcess) -> None:
        self.id = id
        self._guest = guest
        self._process = process
        self._connection = guest.current_connection()
        self._exit: ProcessExit | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield what the program writes to the terminal, until it ends."""
        process = await self._live_process()
        async for piece in process:
            yield piece.data
        self._exit = await process.wait()

    async def write(self, data: str | bytes) -> None:
        """Type this. Control characters act as on a keyboard: `\\x03` is Ctrl-C."""
        await (await self._live_process()).send_stdin(data.encode() if isinstance(data, str) else data)

    async def resize(self, rows: int, columns: int) -> None:
        """Tell the program that the window has changed."""
        if not (0 < rows <= 1000 and 0 < columns <= 1000):
            raise ValueError(f"a terminal of {rows} rows and {columns} columns is not possible")
        (await self._live_process()).resize(rows, columns)

    async def wait(self) -> int:
        """Wait until the program ends, and return its exit code."""
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

    async def _live_process(self) -> FollowedProcess:
        # The event loop is another one, or the connection was lost.
        if self._guest.current_connection() is not self._connection:
            first, second, third = self._process.offsets
            self._process = await self._guest.processes.attach(self.id.encode(), (first, second, third))
            self._connection = self._guest.current_connection()
        return self._process
