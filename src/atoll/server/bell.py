"""Waiting for the next thing that happens, for any number of those who wait."""

from __future__ import annotations

import asyncio


class Bell:
    def __init__(self) -> None:
        self._next = asyncio.Event()

    def ring(self, *_: object) -> None:
        now, self._next = self._next, asyncio.Event()
        now.set()

    @property
    def next(self) -> asyncio.Event:
        """Set at the next ring. Take it before you look, so that nothing is missed in between."""
        return self._next


async def within(event: asyncio.Event, seconds: float) -> None:
    """Return when it is set, or after so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
