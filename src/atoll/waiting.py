"""Waiting in an event loop: for the next time that something happens, and for descriptors up to a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass


class EventSignal:
    """Wakes everyone who waits for the next time that something happens.

    `notify` costs nothing while nobody waits. The signal is bound to an event loop only while somebody waits.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: asyncio.Event | None = None

    def notify(self, *_: object) -> None:
        """Wake everyone who waits now. Arguments are ignored, so that this can serve as a callback."""
        now, self._next = self._next, None
        if now is not None:
            now.set()

    @property
    def next(self) -> asyncio.Event:
        """The event that the next `notify` sets. Take it before looking for changes, so that none is missed."""
        if self._next is None:
            self._next = asyncio.Event()
        return self._next

    async def wait(self) -> None:
        """Return at the next `notify`."""
        await self.next.wait()


async def happens_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set, or until the time is up. Return whether it was set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock, so that several waits can share one limit."""

    due: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        return max(0.0, self.due - time.monotonic())


async def readable(fds: Iterable[int], deadline: Deadline) -> set[int]:
    """Wait until some of the descriptors can be read, and return these; empty when the time is up.

    A pidfd can be read once its process has ended.
    """
    loop = asyncio.get_running_loop()
    ready: set[int] = set()
    woken = asyncio.Event()

    def note(fd: int) -> None:
        ready.add(fd)
        loop.remove_reader(fd)
        woken.set()

    watched = list(fds)
    for fd in watched:
        loop.add_reader(fd, note, fd)
    try:
        async with asyncio.timeout(deadline.left()):
            await woken.wait()
    except TimeoutError:
        pass
    finally:
        for fd in watched:
            loop.remove_reader(fd)
    return ready
