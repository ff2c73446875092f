"""How many sandboxes a pool should keep ready. Pure."""

from __future__ import annotations


class PoolSize:
    """Doubles when somebody had to wait; halves after a time in which less than half was asked for."""

    def __init__(self, least: int, most: int, window_s: float, now: float) -> None:
        if not 0 <= least <= most:
            raise ValueError(f"a pool cannot keep at least {least} and at most {most} sandboxes")
        self._least = least
        self._most = most
        self._window_s = window_s
        self._target = least
        self._since = now
        self._demand = 0

    def asked(self, now: float, *, hit: bool) -> None:
        self.target(now)
        self._demand += 1
        if not hit:
            self._target = min(self._most, max(1, self._target * 2))

    def target(self, now: float) -> int:
        while now - self._since >= self._window_s:
            if self._demand <= self._target // 2:
                self._target = max(self._least, self._target // 2)
            self._demand = 0
            self._since += self._window_s
            if self._target == self._least:
                self._since = max(self._since, now - (now - self._since) % self._window_s)
        return self._target
