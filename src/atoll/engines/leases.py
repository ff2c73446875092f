"""Engines that many sandboxes of a program use together, so that what one has prepared serves the next.

An engine belongs to one event loop. It is made for the first sandbox that asks for its name, and let go of a while
after the last one, when the event loop ends, or when the program does. Nobody has to remember that.
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
"""How long an engine that nobody uses is kept for the next one."""
_EXIT_S = 10.0


@dataclass(slots=True)
class EngineLease:
    """One engine, and how many sandboxes use it."""

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
    """The engine of that name, or the strongest that works here (`auto`). To be given back with `release`."""
    name = registry.canonical(name)
    key = (name, settings, server, api_key)
    lease = _of_this_loop().get(key)
    if lease is None:
        lease = EngineLease(_make(name, settings, server, api_key))
        _of_this_loop()[key] = lease
        # An event loop that ends closes the generators it has seen begin: the only sign that it gives.
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
    """May be called in another event loop than that of the engine, or in none."""
    lease.users -= 1
    with suppress(RuntimeError):
        loop = asyncio.get_running_loop()
        if lease.users == 0 and lease in _of_this_loop().values():
            lease.closing = loop.call_later(LINGER_S, _close_later, lease)


async def close_all() -> None:
    """Let go of all engines of this event loop now. Sandboxes that use them go on, and so do the engines if asked."""
    for lease in list(_of_this_loop().values()):
        await _close(lease)


def _of_this_loop() -> dict[_Key, EngineLease]:
    global _process
    with _lock:
        if _process != os.getpid():  # we are a copy: what the engines hold is another process's
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
    """Of event loops that never ended in order, as that of the synchronous classes, whose thread just stops."""
    if _process != os.getpid():
        return
    for loop, engines in list(_by_loop.items()):
        with suppress(Exception):  # the program is over: `gc` finds what could not be put away
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(close_all(), loop).result(_EXIT_S)
            else:
                asyncio.run(_close_each(list(engines.values())))


async def _close_each(engines: list[EngineLease]) -> None:
    for lease in engines:
        await lease.engine.aclose()


atexit.register(_at_exit)
