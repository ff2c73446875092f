"""What could not be copied, while everything else was."""

from __future__ import annotations

import os

_SHOWN = 5
_KEPT = 1000


class PartialCopyError(OSError):
    """Everything else was copied. `failures` are the first paths with their error numbers, `count` is of all."""

    def __init__(self, failures: list[tuple[str, int]], count: int) -> None:
        shown = [f"{path!r}: {os.strerror(number)}" for path, number in failures[:_SHOWN]]
        more = [f"and {count - len(shown)} more"] if count > len(shown) else []
        super().__init__(failures[0][1], f"{count} not copied: " + ", ".join(shown + more))
        self.failures = failures
        self.count = count


class Failures:
    """Collects them, in bounded memory."""

    def __init__(self) -> None:
        self._first: list[tuple[str, int]] = []
        self._count = 0

    def add(self, path: str, number: int) -> None:
        self._count += 1
        if len(self._first) < _KEPT:
            self._first.append((path, number))

    def raise_if_any(self) -> None:
        if self._count:
            raise PartialCopyError(self._first, self._count)
