"""Work that must come to its end whatever becomes of its caller, and work that ends with the first of several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


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


async def finish_or_stop(work: Coroutine[Any, Any, T], stop: Callable[[], object]) -> T:
    """Run to the end; if the caller is cancelled, `stop` asks the work to end soon, and the cancellation is raised once
    it has. For work that cannot be cancelled itself, above all in threads."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop()
        await ended(task)
        raise


async def ended(task: asyncio.Future[Any]) -> None:
    """Return when the task has ended, however often the caller is cancelled meanwhile. Its failure is nobody's."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


async def until_first(*work: Coroutine[Any, Any, object], expected: tuple[type[Exception], ...] = ()) -> None:
    """Run all until one ends, then cancel the others and wait for them. Raises what one of them met, unless that is
    among the expected ways to end."""
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
