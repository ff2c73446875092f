"""The portal: an event loop in a thread of its own, through which the synchronous classes drive the asynchronous."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_DONE = object()


class Portal:
    """Works from any thread, also where another event loop runs (a notebook)."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="atoll", daemon=True).start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it to its end. Ctrl-C while waiting cancels it and waits until it has cleaned up."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            concurrent.futures.wait([future], timeout=30)
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        try:
            while (item := self.call(_next(items))) is not _DONE:
                yield item  # type: ignore[misc]
        finally:
            if (close := getattr(items, "aclose", None)) is not None:
                self.call(close())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _next(items: AsyncIterator[T]) -> T | object:
    try:
        return await items.__anext__()
    except StopAsyncIteration:
        return _DONE


_lock = threading.Lock()
_portals: dict[int, Portal] = {}


def portal() -> Portal:
    """The one of this process; a forked child gets its own, because threads do not survive a fork."""
    with _lock:
        pid = os.getpid()
        if pid not in _portals:
            _portals.clear()
            _portals[pid] = Portal()
        return _portals[pid]
