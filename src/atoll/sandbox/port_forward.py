"""A port of this machine that leads to a port inside a sandbox, over the agent's stream: it needs no network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from atoll.errors import SandboxError
from atoll.guest.port_streams import PortStream
from atoll.two_way_copy import StreamEnd, copy_until_both_end

_MAX_CONNECTIONS = 256

Connect = Callable[[], Awaitable[PortStream]]


class AsyncForward:
    """Open until `aclose`, or as long as an `async with` of it. What opens later inside works at once."""

    def __init__(self, connect: Connect, port: int) -> None:
        self._connect = connect
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = port
        """The port inside."""

    async def listen(self, local_port: int, host: str) -> Self:
        """Called once by `expose`. Raises OSError if that port is taken."""
        self._server = await asyncio.start_server(self._accepted, host, local_port)
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens on this machine."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """For a browser, if what listens inside speaks HTTP."""
        host, port = self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    async def aclose(self) -> None:
        """Close it and every connection through it. May be repeated."""
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
            pass  # nothing listens inside, or no longer: the caller sees the end
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
