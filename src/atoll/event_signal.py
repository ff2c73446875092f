"""Waking everyone who waits for the next time that something happens."""

from __future__ import annotations

import asyncio


class EventSignal:
    """To notify costs nothing while nobody waits. Bound to no event loop until somebody does."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: asyncio.Event | None = None

    def notify(self, *_: object) -> None:
        """Wake all who wait now; who comes later waits for the next time. Takes and ignores what a callback gets."""
        now, self._next = self._next, None
        if now is not None:
            now.set()

    @property
    def next(self) -> asyncio.Event:
        """Set the next time. Whoever takes it before looking at what may have changed misses no change in between."""
        if self._next is None:
            self._next = asyncio.Event()
        return self._next

    async def wait(self) -> None:
        """Return the next time it happens."""
        await self.next.wait()


async def happens_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until an event is set, or for so long; whether it was set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
