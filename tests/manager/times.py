"""A clock that goes on only when it is told to."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class ManualClock:
    def __init__(self) -> None:
        self.boot_id = "first boot"
        self.jump = 0.0
        self._now = 1000.0
        self._order = itertools.count()
        self._sleeping: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1.7e9 + self._now + self.jump

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleeping, (self._now + seconds, next(self._order), future))
        await future

    def sleeps(self) -> list[float]:
        """How much longer each sleeper sleeps."""
        return sorted(due - self._now for due, _, future in self._sleeping if not future.done())

    def advance(self, seconds: float) -> None:
        self._now += seconds
        while self._sleeping and self._sleeping[0][0] <= self._now:
            future = heapq.heappop(self._sleeping)[2]
            if not future.done():
                future.set_result(None)
