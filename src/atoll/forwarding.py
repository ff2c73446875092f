"""A port of this machine that leads to a port inside a sandbox, over the agent's stream: it needs no network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from atoll.errors import SandboxError
from atoll.guest.ports import PortStream

_PIECE = 65_536
_MOST_CONNECTIONS = 256

Connect = Callable[[], Awaitable[PortStream]]


class AsyncForward:
    """Open until `aclose`, or as long as an `async with` of it. What opens later inside works at once."""

    def __init__(self, connect: Connect, port: int) -> None:
        self._connect = connect
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = port
        """The port inside."""

    async def _open(self, local_port: int, host: str) -> Self:
        """Listen. OSError if that port is taken."""
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
        if len(self._tasks) >= _MOST_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with await self._connect() as stream:
                both = [asyncio.create_task(_out(reader, stream)), asyncio.create_task(_back(stream, writer))]
                try:
                    await asyncio.gather(*both)
                finally:
                    for each in both:
                        each.cancel()
        except (OSError, SandboxError):
            pass  # nothing listens inside, or no longer: the caller sees the end
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def _out(reader: asyncio.StreamReader, stream: PortStream) -> None:
    while data := await reader.read(_PIECE):
        await stream.write(data)
    await stream.write_eof()


async def _back(stream: PortStream, writer: asyncio.StreamWriter) -> None:
    while data := await stream.read(_PIECE):
        writer.write(data)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()
