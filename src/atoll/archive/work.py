"""One piece of blocking work: how it is stopped, how long it may take, and how it says what it is doing.

Work runs in a thread, which nobody can interrupt from outside. So everything that loops calls `check()`, and
everything that blocks in the kernel registers with `on_cancel` what ends the blocking (closing a socket, killing a
process).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from atoll.errors import ImageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Progress:
    """What is being done right now. `total_bytes` is None when nobody knows how much is to come."""

    stage: str
    """One of `wait`, `pull`, `build`, `extract`, `check`."""
    detail: str
    done_bytes: int = 0
    total_bytes: int | None = None


ProgressCallback = Callable[[Progress], None]


class WorkCancelledError(Exception):
    """Unwinds the thread of a cancelled work. Never leaves this package."""


class Work:
    def __init__(self, progress: ProgressCallback | None = None, *, timeout_s: float = 3600.0) -> None:
        self._progress = progress
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._breakers: list[Callable[[], None]] = []

    def cancel(self) -> None:
        with self._lock:
            self._cancelled.set()
            breakers, self._breakers = self._breakers, []
        for breaker in breakers:
            with contextlib.suppress(OSError):
                breaker()

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def check(self) -> None:
        """Raise if this work should not go on."""
        if self._cancelled.is_set():
            raise WorkCancelledError
        if time.monotonic() > self._deadline:
            raise ImageError(f"the image was not ready within {self._timeout_s:.0f} s")

    def sleep(self, seconds: float) -> None:
        self._cancelled.wait(min(seconds, self.remaining_s))
        self.check()

    def report(self, stage: str, detail: str, done_bytes: int = 0, total_bytes: int | None = None) -> None:
        if self._progress is not None:
            self._progress(Progress(stage, detail, done_bytes, total_bytes))

    @contextlib.contextmanager
    def on_cancel(self, breaker: Callable[[], None]) -> Iterator[None]:
        """While inside, cancelling also calls `breaker`, from another thread."""
        with self._lock:
            self.check()
            self._breakers.append(breaker)
        try:
            yield
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._breakers.remove(breaker)

    def detached(self, function: Callable[[], T], discard: Callable[[T], None]) -> T:
        """Call something that cannot be broken off, such as a name lookup, and abandon it when cancelled.

        A result that arrives too late is given to `discard`.
        """
        done = threading.Event()
        lock = threading.Lock()
        results: list[T] = []
        failures: list[BaseException] = []
        abandoned = False

        def run() -> None:
            try:
                result = function()
            except BaseException as error:  # handed to the caller's thread
                failures.append(error)
            else:
                with lock:
                    if abandoned:
                        discard(result)
                    else:
                        results.append(result)
            done.set()

        threading.Thread(target=run, daemon=True, name="atoll-images").start()
        try:
            while not done.wait(0.02):
                self.check()
        except BaseException:
            with lock:
                abandoned = True
                for result in results:
                    discard(result)
            raise
        if failures:
            raise failures[0]
        return results[0]
