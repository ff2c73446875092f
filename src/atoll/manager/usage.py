"""What counts as a use of a sandbox, and how long it has been unused.

An operation counts from its start to its end, even while nothing is transferred. Something that lasts without a waiting
caller (a terminal, a watch, a port, a background command that nobody follows) counts with each byte.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from atoll.guest.guest import Guest
from atoll.guest.inbox import Inbox
from atoll.guest.port_streams import AsyncPortStream, Ports
from atoll.model import ExecutionResult
from atoll.sandbox.command import AsyncCommand, Output
from atoll.sandbox.shell import AsyncShell
from atoll.sandbox.terminal import AsyncTerminal
from atoll.tracing import span
from atoll.waiting import EventSignal

P = ParamSpec("P")
T = TypeVar("T")
Use = Callable[[], AbstractAsyncContextManager[None]]
"""Returns a context manager; the sandbox is in use while its block runs."""


class Usage:
    __slots__ = ("_now", "_quiet", "active", "last")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._quiet = EventSignal()
        self.active = 0
        """Number of operations in progress."""
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
                self._quiet.notify()

    async def quiet(self) -> None:
        """Return when no operation is in progress."""
        while self.active:
            await self._quiet.wait()

    def idle_s(self) -> float:
        return 0.0 if self.active else max(0.0, self._now() - self.last)


class MeteredSocket(socket.socket):
    """A connection to an agent that counts every transfer as a use."""

    usage: Usage

    @classmethod
    def of(cls, stream: socket.socket, usage: Usage) -> MeteredSocket:
        """Take over the connection. The given socket object is detached afterwards."""
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


def counted(
    method: Callable[Concatenate[Any, P], Awaitable[T]], *, asleep: bool = False
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Wrap a method so that the sandbox is in use while it runs. With `asleep` the method needs nothing inside, so a
    paused sandbox stays paused."""

    title = f"manager.{getattr(method, '__name__', 'call')}"

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        with span(title, sandbox_id=self.id):
            async with self.use(asleep=asleep):
                return await method(self, *args, **options)

    return call


def timed(
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Wrap a method so that its duration is reported."""

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        started = time.perf_counter()
        result = await method(self, *args, **options)
        self.supervisor.executed(time.perf_counter() - started)
        return result

    return call


def counted_stream(
    method: Callable[Concatenate[Any, P], AsyncIterator[T]],
) -> Callable[Concatenate[Any, P], AsyncIterator[T]]:
    """As `counted`, for a method that yields results one by one."""

    @functools.wraps(method)
    async def iterate(self: Any, /, *args: P.args, **options: P.kwargs) -> AsyncIterator[T]:
        async with self.use():
            pieces = method(self, *args, **options)
            assert isinstance(pieces, AsyncGenerator)
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece

    return iterate


class InUse:
    """Something that lasts. The sandbox is in use during some of its operations, and is resumed for them if
    necessary."""

    def __init__(self, use: Use, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._use = use


class InUseCommand(InUse, AsyncCommand):
    """A command. The sandbox is in use while a caller waits for it or reads its output."""

    async def __aiter__(self) -> AsyncIterator[Output]:
        async with self._use():
            async for piece in super().__aiter__():
                yield piece


class InUseTerminal(InUse, AsyncTerminal):
    async def write(self, data: str | bytes) -> None:
        async with self._use():
            await super().write(data)

    async def resize(self, rows: int, columns: int) -> None:
        async with self._use():
            await super().resize(rows, columns)


class InUsePort(InUse, AsyncPortStream):
    async def write(self, data: bytes) -> None:
        async with self._use():
            await super().write(data)


class InUsePorts(Ports):
    def __init__(self, use: Use, guest: Guest) -> None:
        super().__init__(guest)
        self._use = use

    def new_stream(self, inbox: Inbox) -> AsyncPortStream:
        return InUsePort(self._use, inbox)


class InUseShell(InUse, AsyncShell):
    async def run(self, command: str, timeout: float) -> ExecutionResult:
        async with self._use():
            return await super().run(command, timeout)
