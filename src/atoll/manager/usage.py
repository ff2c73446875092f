"""Whether a sandbox is in use, and since when it is not.

An operation counts from its start to its end, also while nothing is transferred. What lasts without anybody waiting for
it (a terminal, a watch, a port, a background command that nobody follows) counts with each byte.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Usage:
    __slots__ = ("_now", "_waiting", "active", "last")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._waiting: list[asyncio.Future[None]] = []
        self.active = 0
        """Operations that are under way."""
        self.last = now()
        """When the last byte went in or out, or the last operation began or ended."""

    def touch(self) -> None:
        self.last = self._now()

    @contextmanager
    def operation(self) -> Iterator[None]:
        self.active += 1
        self.touch()
        try:
            yield
        finally:
            self.active -= 1
            self.touch()
            if not self.active:
                waiting, self._waiting = self._waiting, []
                for future in waiting:
                    if not future.done():
                        future.set_result(None)

    async def quiet(self) -> None:
        """Return when no operation is under way."""
        while self.active:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def idle_s(self) -> float:
        return 0.0 if self.active else max(0.0, self._now() - self.last)


class MeteredSocket(socket.socket):
    """A connection to an agent that reports every transfer."""

    usage: Usage

    @classmethod
    def of(cls, stream: socket.socket, usage: Usage) -> MeteredSocket:
        """Takes the connection over: the given object is empty afterwards."""
        timeout = stream.gettimeout()
        metered = cls(stream.family, stream.type, stream.proto, fileno=stream.detach())
        metered.settimeout(timeout)
        metered.usage = usage
        return metered

    def recv_into(self, *args: object, **options: object) -> int:
        self.usage.touch()
        return super().recv_into(*args, **options)  # type: ignore[arg-type]

    def send(self, *args: object, **options: object) -> int:
        self.usage.touch()
        return super().send(*args, **options)  # type: ignore[arg-type]
