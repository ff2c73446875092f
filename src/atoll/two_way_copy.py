"""Bytes from one end to another and back, in an event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol

from atoll.cancellation import until_first

_PIECE = 256 << 10


class End(Protocol):
    """One end of a stream of bytes. Who made it closes it."""

    async def read(self) -> bytes:
        """As soon as there are any; b"" at the end."""

    async def write(self, data: bytes) -> None:
        """Return when more may be written."""

    async def write_eof(self) -> None:
        """Nothing more will be written; reading goes on."""


async def copy_until_both_end(one: End, other: End) -> None:
    """Each direction passes its end on, and the other goes on. Raises what either met, and then both are over."""
    tasks = [asyncio.create_task(_copy(one, other)), asyncio.create_task(_copy(other, one))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def copy_until_one_ends(one: End, other: End, *, expected: tuple[type[Exception], ...] = (OSError,)) -> None:
    """For ends that cannot be closed by halves. Raises what either met, unless that is an expected way to end."""
    await until_first(_carry(one, other), _carry(other, one), expected=expected)


class CopyTasks:
    """Copies that run in the background. Each belongs to the event loop that started it, and ends with that loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, copying: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(copying, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Cancel the copies of the running event loop, and wait until they have ended."""
        loop = asyncio.get_running_loop()
        mine = [task for task in self._tasks if task.get_loop() is loop]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)


async def _copy(source: End, target: End) -> None:
    await _carry(source, target)
    await target.write_eof()


async def _carry(source: End, target: End) -> None:
    while data := await source.read():
        await target.write(data)


class SocketEnd:
    """A connected socket that does not block."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self) -> bytes:
        return await self._loop.sock_recv(self._sock, _PIECE)

    async def write(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    async def write_eof(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)


class StreamEnd:
    """The two halves of a connection of asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: int = 65_536) -> None:
        self._reader, self._writer, self._piece = reader, writer, piece

    async def read(self) -> bytes:
        return await self._reader.read(self._piece)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def write_eof(self) -> None:
        with suppress(OSError):
            self._writer.write_eof()
