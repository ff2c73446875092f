"""Copying bytes between two streams in both directions."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol

from atoll.cancellation import until_first

_PIECE = 256 << 10


class End(Protocol):
    """One end of a copy, a byte stream. Its creator closes it."""

    async def read(self) -> bytes:
        """Return bytes as soon as some are available, or b"" at the end."""

    async def write(self, data: bytes) -> None:
        """Write bytes, and return when more may be written."""

    async def write_eof(self) -> None:
        """Close the writing side. Reading can continue."""


async def copy_until_both_end(one: End, other: End) -> None:
    """Copy until both directions have ended. The end of one is passed on while the other continues.

    An exception of either ends both and is raised.
    """
    tasks = [asyncio.create_task(_copy(one, other)), asyncio.create_task(_copy(other, one))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def copy_until_one_ends(one: End, other: End, *, expected: tuple[type[Exception], ...] = (OSError,)) -> None:
    """Copy until one direction has ended, for streams whose directions cannot be closed separately.

    An exception of either is raised, unless it is an expected one.
    """
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
    """A connected non-blocking socket."""

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
    """The reader and writer of an asyncio connection."""

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
