"""Running coroutines to their end even if the caller is cancelled, or until the first of several ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end even if the caller is cancelled meanwhile. The cancellation is raised afterwards."""
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


async def finish_or_stop(work: Coroutine[Any, Any, T], stop: Callable[[], object]) -> T:
    """Run work that cannot be cancelled itself, such as work in a thread.

    If the caller is cancelled, `stop` is called to make the work end soon, and the cancellation is raised once it has.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop()
        await ended(task)
        raise


async def ended(task: asyncio.Future[Any]) -> None:
    """Wait until the task has ended, ignoring cancellations of the caller. An exception of the task is discarded."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


async def until_first(*work: Coroutine[Any, Any, object], expected: tuple[type[Exception], ...] = ()) -> None:
    """Run all coroutines until one ends, then cancel the others and wait for them. Raises the exception of one of
    them, unless it is an expected one."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, expected):
            raise result
