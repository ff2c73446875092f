"""How many bytes may wait in memory for one account: outputs, lists and bodies that are not streamed.

A server opens a `Reservation` for each request. Code that gathers bytes for the request asks for room first, and makes
do with less if there is none: an output is then cut in the middle, as one beyond its own limit is, and a list is
refused. Without a server nothing is counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextvars import ContextVar

from atoll.errors import SandboxResourceError

_FLOOR = 2 << 20
"""What an account gets in any case, however much all others hold."""
reservation: ContextVar[Reservation | None] = ContextVar("reservation", default=None)


class Budgets:
    """What all accounts hold right now."""

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
        """Take room for `size` bytes, or as many as there is room for. Returns how many."""
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
    """What one request holds, until it is over."""

    def __init__(self, budgets: Budgets, account: str) -> None:
        self.account = account
        self._budgets = budgets
        self._size = 0
        self._open = True

    def take(self, size: int) -> int:
        """As `Budgets.take`; nothing once the request is over."""
        granted = self._budgets.take(self.account, size) if self._open else 0
        self._size += granted
        return granted

    def close(self) -> None:
        """May be repeated."""
        if self._open:
            self._open = False
            self._budgets.give_back(self.account, self._size)


def need(size: int) -> None:
    """Room for something that is held as a whole or not at all. Raises SandboxResourceError."""
    mine = reservation.get()
    if mine is not None and mine.take(size) < size:
        raise SandboxResourceError(
            "your pending answers need too much of the server's memory at once", hint="Ask for fewer at a time."
        )
