"""Waiting in an event loop for descriptors, up to a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment, so that several waits share one limit."""

    due: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        return max(0.0, self.due - time.monotonic())


async def readable(fds: Iterable[int], deadline: Deadline) -> set[int]:
    """Those that can be read (or, for a pidfd: whose process has ended). Empty when the time is up."""
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
