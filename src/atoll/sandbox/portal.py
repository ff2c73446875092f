"""The portal: an event loop in its own thread, on which the synchronous classes run the asynchronous ones."""

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
    """An event loop in a daemon thread. It can be called from any thread, even one that runs an event loop itself,
    such as a notebook's."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="atoll", daemon=True).start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. Ctrl-C cancels it and waits at most 30 seconds for its clean-up."""
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
    """Return the portal of this process. A forked child gets a new one, because threads do not survive a fork."""
    with _lock:
        pid = os.getpid()
        if pid not in _portals:
            _portals.clear()
            _portals[pid] = Portal()
        return _portals[pid]
