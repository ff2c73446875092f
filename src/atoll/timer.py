"""Sleeping with the kernel's timers, because asyncio's clock stops while the machine is suspended.

A second timer reports that the wall clock was set. Tests replace `Clock` to control the time.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

_CLOCK_REALTIME, _CLOCK_BOOTTIME = 0, 7
_TFD_NONBLOCK, _TFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_TFD_ABSTIME, _TFD_CANCEL_ON_SET = 1, 2
_FAR_S = 365 * 86400
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


def _timer(clock: int, seconds: float, flags: int) -> int:
    """Return a descriptor that becomes readable when the timer expires. OSError if the kernel has no such timer."""
    fd = _libc.timerfd_create(clock, _TFD_NONBLOCK | _TFD_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")
    whole = int(seconds)
    value = _Itimerspec(_Timespec(0, 0), _Timespec(whole, int((seconds - whole) * 1e9)))
    if _libc.timerfd_settime(fd, flags, ctypes.byref(value), None) < 0:
        os.close(fd)
        raise OSError(ctypes.get_errno(), "timerfd_settime")
    return int(fd)


async def sleep(seconds: float) -> None:
    """Sleep for this long, counting time in which the machine is suspended; wake early if the wall clock is set."""
    if seconds <= 0:
        await asyncio.sleep(0)
        return
    loop = asyncio.get_running_loop()
    seconds = min(seconds, _FAR_S)
    timers: list[int] = []
    due: asyncio.Future[None] = loop.create_future()

    def over() -> None:
        if not due.done():
            due.set_result(None)

    try:
        with suppress(OSError):  # without these timers, asyncio's fallback below ends the sleep
            timers.append(_timer(_CLOCK_BOOTTIME, seconds, 0))
            timers.append(_timer(_CLOCK_REALTIME, time.time() + _FAR_S, _TFD_ABSTIME | _TFD_CANCEL_ON_SET))
        for timer in timers:
            loop.add_reader(timer, over)
        fallback = loop.call_later(seconds + (1.0 if timers else 0.0), over)
        try:
            await due
        finally:
            fallback.cancel()
    finally:
        for timer in timers:
            loop.remove_reader(timer)
            os.close(timer)


class Clock(Protocol):
    """The source of time for lifetimes and waits."""

    @property
    def boot_id(self) -> str:
        """Values of `now` can be compared only if they come from the same boot."""

    def now(self) -> float:
        """Seconds since the machine started. This clock never jumps, and continues while the machine is suspended."""

    def wall(self) -> float:
        """Seconds since 1970, for people. This clock may jump."""

    async def sleep(self, seconds: float) -> None:
        """Sleep for this long, measured by `now`, or less if the wall clock is set."""


class SystemClock:
    """The clocks of this machine."""

    @functools.cached_property
    def boot_id(self) -> str:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def now(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await sleep(seconds)
