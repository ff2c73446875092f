"""Waiting in an event loop for descriptors, and finishing what must be finished."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


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


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end even if the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:
            break
    if cancelled is not None:
        task.exception()
        raise cancelled
    return task.result()
