"""Engines that the sandboxes of a program share.

An engine belongs to one event loop. It is created for the first sandbox that needs it. It is closed a while after the
last one has released it, or when the event loop or the program ends. No caller has to close it.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field

from atoll.engines import registry
from atoll.engines.contract import Engine
from atoll.settings import Settings

LINGER_S = 5.0
"""How long an unused engine is kept for the next sandbox."""
_EXIT_S = 10.0


@dataclass(slots=True)
class EngineLease:
    """An engine, and the number of sandboxes that use it."""

    engine: Engine
    users: int = 0
    closing: asyncio.TimerHandle | None = None
    end: AsyncGenerator[None, None] | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


_Key = tuple[str, Settings, str | None, str | None]
_lock = threading.Lock()
_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, EngineLease]] = weakref.WeakKeyDictionary()
_process = os.getpid()


async def acquire(name: str, settings: Settings, server: str | None = None, api_key: str | None = None) -> EngineLease:
    """Return the engine of that name; `auto` stands for the first of `native`, `oci` and `bubblewrap` that works here.

    Call `release` when done.
    """
    name = registry.canonical(name)
    key = (name, settings, server, api_key)
    lease = _of_this_loop().get(key)
    if lease is None:
        lease = EngineLease(_make(name, settings, server, api_key))
        _of_this_loop()[key] = lease
        # An event loop that ends closes the async generators that were started in it. It gives no other notice.
        lease.end = _at_the_end(lease)
        await anext(lease.end)
    lease.users += 1
    if lease.closing is not None:
        lease.closing.cancel()
        lease.closing = None
    return lease


def _make(name: str, settings: Settings, server: str | None, api_key: str | None) -> Engine:
    if name == "remote":
        return registry.remote(settings, server, api_key)
    return registry.auto(settings)[0] if name == "auto" else registry.get(name, settings)


def release(lease: EngineLease) -> None:
    """Give an engine back. May be called in an event loop other than the engine's, or outside of any."""
    lease.users -= 1
    with suppress(RuntimeError):
        loop = asyncio.get_running_loop()
        if lease.users == 0 and lease in _of_this_loop().values():
            lease.closing = loop.call_later(LINGER_S, _close_later, lease)


async def close_all() -> None:
    """Close all engines of this event loop now. Sandboxes that use them continue, and their engines can still be
    used."""
    for lease in list(_of_this_loop().values()):
        await _close(lease)


def _of_this_loop() -> dict[_Key, EngineLease]:
    global _process
    with _lock:
        if _process != os.getpid():  # this process was forked: the engines belong to the parent
            _process = os.getpid()
            _by_loop.clear()
        return _by_loop.setdefault(asyncio.get_running_loop(), {})


async def _at_the_end(lease: EngineLease) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        mine = _of_this_loop()
        for key in [key for key, value in mine.items() if value is lease]:
            del mine[key]
        if lease.closing is not None:
            lease.closing.cancel()
            lease.closing = None
        await lease.engine.aclose()


def _close_later(lease: EngineLease) -> None:
    lease.closing = None
    task = asyncio.ensure_future(_close(lease))
    lease.tasks.add(task)
    task.add_done_callback(lease.tasks.discard)


async def _close(lease: EngineLease) -> None:
    if lease.end is not None:
        await lease.end.aclose()


def _at_exit() -> None:
    """Close the engines of event loops that never ended in order. That of the synchronous classes is one: its thread
    just stops."""
    if _process != os.getpid():
        return
    for loop, engines in list(_by_loop.items()):
        with suppress(Exception):  # the program is ending: `gc` removes what could not be cleaned up
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(close_all(), loop).result(_EXIT_S)
            else:
                asyncio.run(_close_each(list(engines.values())))


async def _close_each(engines: list[EngineLease]) -> None:
    for lease in engines:
        await lease.engine.aclose()


atexit.register(_at_exit)
