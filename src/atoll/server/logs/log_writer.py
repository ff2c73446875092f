"""Writes the lines of a log in a thread of its own, so that nobody waits for whoever reads them.

stderr is often a pipe, and a pipe that nobody reads blocks its writer. Lines therefore wait in memory, up to a limit.
What does not fit is dropped and counted, and the log says how many lines that were as soon as it is read again.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator

MAX_WAITING_BYTES = 4 << 20
_GATHER_S = 0.03
"""How long the thread gathers lines before it writes: waking it for each one would cost every request."""


class LogWriter:
    def __init__(self, fd: int, on_dropped: Callable[[int], str]) -> None:
        """`on_dropped` makes the line that says how many are missing."""
        self._fd, self._on_dropped = fd, on_dropped
        self._lock = threading.RLock()  # a finalizer may log in the middle of anything
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._untold = 0
        self.dropped = 0
        """How many lines were dropped so far."""
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="atoll-log", daemon=True)
        self._thread.start()

    def put(self, text: str) -> None:
        """Take a line to be written soon. Never waits."""
        line = f"{text}\n".encode(errors="replace")
        with self._lock:
            if self._waiting_bytes + len(line) > MAX_WAITING_BYTES:
                self.dropped += 1
                self._untold += 1
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
        if not self._wake.is_set():
            self._wake.set()

    def close(self, within_s: float) -> None:
        """Write what waits, but give up a reader that takes nothing for so long."""
        self._closing.set()
        self._wake.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._closing.wait(_GATHER_S)
            self._wake.clear()
            closing = self._closing.is_set()
            with self._lock:
                lines, self._lines = self._lines, []
                untold, self._untold = self._untold, 0
            for portion in _portions(lines):
                self._write(portion)
                with self._lock:
                    self._waiting_bytes -= len(portion)
            if untold:
                self._write(f"{self._on_dropped(untold)}\n".encode(errors="replace"))
            if closing:
                return

    def _write(self, portion: bytes) -> None:
        rest = memoryview(portion)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # somebody else made it non-blocking
                select.select([], [self._fd], [])
            except OSError:  # nobody can ever read it
                self.dropped += portion.count(b"\n")
                return


def _portions(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Join lines as long as a pipe takes them at once: then no line of another process gets into the middle of one."""
    portion = b""
    for line in lines:
        if portion and len(portion) + len(line) > select.PIPE_BUF:
            yield portion
            portion = b""
        portion += line
    if portion:
        yield portion
