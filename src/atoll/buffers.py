"""Limits on the memory that each account uses for pending responses: outputs, lists and bodies that are not streamed.

A server opens a `Reservation` for each request. Code that collects bytes for the request first reserves memory, and may
get less than it requested: an output is then cut in the middle, as if it exceeded its own limit, and a list is refused.
Without a server nothing is counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextvars import ContextVar

from atoll.errors import SandboxResourceError

_FLOOR = 2 << 20
"""How many bytes an account may always reserve, regardless of what other accounts hold."""
reservation: ContextVar[Reservation | None] = ContextVar("reservation", default=None)


class Budgets:
    """The bytes that all accounts currently hold, and their limits."""

    def __init__(self, of_one: int, of_all: int) -> None:
        self.of_one, self.of_all = of_one, of_all
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._total = 0

    def open(self, account: str) -> Reservation:
        return Reservation(self, account)

    def held_by(self, account: str) -> int:
        return self._held[account]

    def take(self, account: str, size: int) -> int:
        """Reserve `size` bytes, or as many as are available. Returns how many."""
        with self._lock:
            mine = self._held[account]
            room = min(self.of_one - mine, max(self.of_all - self._total, _FLOOR - mine))
            granted = max(0, min(size, room))
            self._held[account] += granted
            self._total += granted
        return granted

    def give_back(self, account: str, size: int) -> None:
        with self._lock:
            self._total -= size
            self._held[account] -= size
            if not self._held[account]:
                del self._held[account]


class Reservation:
    """The bytes that one request holds until it is closed."""

    def __init__(self, budgets: Budgets, account: str) -> None:
        self.account = account
        self._budgets = budgets
        self._size = 0
        self._open = True

    def take(self, size: int) -> int:
        """Reserve bytes, like `Budgets.take`. Returns 0 once the request is over."""
        granted = self._budgets.take(self.account, size) if self._open else 0
        self._size += granted
        return granted

    def close(self) -> None:
        """Give all bytes back. May be repeated."""
        if self._open:
            self._open = False
            self._budgets.give_back(self.account, self._size)


def need(size: int) -> None:
    """Reserve memory for something that cannot be shortened. Raises SandboxResourceError if it is not available."""
    mine = reservation.get()
    if mine is not None and mine.take(size) < size:
        raise SandboxResourceError(
            "your pending responses need too much of the server's memory at once", hint="Request fewer at a time."
        )
