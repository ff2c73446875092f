"""Port forwards: local ports that lead to ports inside a sandbox through its agent, without using its network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from atoll.errors import SandboxError
from atoll.guest.port_streams import AsyncPortStream
from atoll.two_way_copy import StreamEnd, copy_until_both_end

_MAX_CONNECTIONS = 256

Connect = Callable[[], Awaitable[AsyncPortStream]]


class AsyncForward:
    """A port forward, open until it is closed or its `async with` block ends.

    The port inside may be opened later than the forward.
    """

    def __init__(self, connect: Connect, port: int) -> None:
        self._connect = connect
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = port
        """The port inside."""

    async def listen(self, local_port: int, host: str) -> Self:
        """Start listening; `expose` calls this once. Raises OSError if the local port is in use."""
        self._server = await asyncio.start_server(self._accepted, host, local_port)
        return self

    @property
    def address(self) -> tuple[str, int]:
        """The local address and port."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """The http URL of the local port, for when the program inside is an HTTP server."""
        host, port = self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    async def aclose(self) -> None:
        """Close the local port and every connection through it. May be repeated."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= _MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with await self._connect() as stream:
                await copy_until_both_end(StreamEnd(reader, writer), stream)
        except (OSError, SandboxError):
            pass  # nothing listens inside (any more); the client sees its connection close
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
