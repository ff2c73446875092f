"""A token bucket, which limits a rate: an average number per second, and bursts up to a maximum."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """A token bucket, full at first. `now` is a clock in seconds; if it goes back, the tokens do not change."""

    __slots__ = ("_at", "_now", "_tokens", "burst", "per_s")

    def __init__(self, per_s: float, burst: float, now: Callable[[], float] = time.monotonic) -> None:
        self.per_s, self.burst = per_s, burst
        self._now = now
        self._tokens = burst
        self._at = now()

    def limit(self, per_s: float, burst: float) -> None:
        """Change the rate and the maximum burst."""
        self._refill()
        self.per_s, self.burst = per_s, burst
        self._tokens = min(self._tokens, burst)

    @property
    def left(self) -> float:
        """How many tokens are left. The number may be negative after `overdraw`."""
        self._refill()
        return self._tokens

    def is_full(self) -> bool:
        """Return whether the bucket is full. A full bucket is equal to a new one and can be discarded."""
        return self.left >= self.burst

    def take(self, number: float = 1.0) -> bool:
        """Take this many tokens, or none if there are fewer. Returns whether they were taken."""
        if self.left < number:
            return False
        self._tokens -= number
        return True

    def take_up_to(self, number: int) -> int:
        """Take up to this many tokens, a whole number. Returns how many."""
        granted = max(0, min(number, int(self.left)))
        self._tokens -= granted
        return granted

    def overdraw(self, number: float) -> None:
        """Take this many tokens even if there are fewer, for events that are counted after they happened."""
        self._tokens -= number

    def wait_s(self, number: float = 1.0) -> float:
        """Return how many seconds it takes until there are this many tokens."""
        if self._tokens >= number:  # avoids reading the clock
            return 0.0
        self._refill()
        return max(0.0, (number - self._tokens) / self.per_s)

    def _refill(self) -> None:
        now = self._now()
        self._tokens = min(self.burst, self._tokens + max(0.0, now - self._at) * self.per_s)
        self._at = now
