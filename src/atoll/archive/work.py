"""Blocking work that can be cancelled, has a timeout and reports progress.

Work runs in a thread, which cannot be interrupted from outside. So every loop calls `check()`, and code that blocks in
the kernel registers a function with `on_cancel` that ends the blocking, such as closing a socket or killing a process.
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
    """The current step of the work. `total_bytes` is None if the total is unknown."""

    stage: str
    """One of `wait`, `pull`, `build`, `extract`, `check`, `save`, `push`."""
    detail: str
    done_bytes: int = 0
    total_bytes: int | None = None
    step: int = 0
    """Of a build: the number of the step in progress, from 1 on."""
    steps: int = 0


ProgressCallback = Callable[[Progress], None]


class WorkCancelledError(Exception):
    """Unwinds the thread of cancelled work. `Images` converts it, so users never see it."""


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
        """Raise if the work was cancelled or its time is over."""
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
        """Within this context, `cancel` also calls `breaker`, from another thread."""
        with self._lock:
            self.check()
            self._breakers.append(breaker)
        try:
            yield
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._breakers.remove(breaker)

    @contextlib.contextmanager
    def part(self) -> Iterator[Work]:
        """Provide work that can be cancelled alone, and is cancelled with this one. It has the same deadline."""
        part = Work(timeout_s=self._timeout_s)
        part._deadline = self._deadline
        with self.on_cancel(part.cancel):
            yield part

    def detached(self, function: Callable[[], T], discard: Callable[[T], None]) -> T:
        """Call a function that cannot be interrupted, such as a name lookup, and abandon it when cancelled.

        A result that arrives too late is passed to `discard`.
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
