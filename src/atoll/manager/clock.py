"""The time, as the manager sees it; tests bring their own."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Protocol

from atoll import timer


class Clock(Protocol):
    @property
    def boot_id(self) -> str:
        """Values of `now` can be compared only if they come from the same one."""

    def now(self) -> float:
        """Seconds since the machine started. Never jumps, and goes on while the machine sleeps."""

    def wall(self) -> float:
        """Seconds since 1970, for people. May jump."""

    async def sleep(self, seconds: float) -> None:
        """For so long by `now`; less when the clock on the wall is set."""


class SystemClock:
    @functools.cached_property
    def boot_id(self) -> str:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await timer.sleep(seconds)
