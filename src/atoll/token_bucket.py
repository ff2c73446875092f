"""A bucket of tokens: so much at once after a while without any, and so much per second in the long run."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Full at first. `now` is a clock in seconds; if it goes back, nothing is gained or lost."""

    __slots__ = ("_at", "_now", "_tokens", "burst", "per_s")

    def __init__(self, per_s: float, burst: float, now: Callable[[], float] = time.monotonic) -> None:
        self.per_s, self.burst = per_s, burst
        self._now = now
        self._tokens = burst
        self._at = now()

    def limit(self, per_s: float, burst: float) -> None:
        """Change both limits from now on."""
        self._refill()
        self.per_s, self.burst = per_s, burst
        self._tokens = min(self._tokens, burst)

    @property
    def left(self) -> float:
        """How many tokens there are; negative after `overdraw`."""
        self._refill()
        return self._tokens

    def is_full(self) -> bool:
        """Whether it is as good as new, so that it need not be kept."""
        return self.left >= self.burst

    def take(self, number: float = 1.0) -> bool:
        """Take so many, or none if there are fewer."""
        if self.left < number:
            return False
        self._tokens -= number
        return True

    def take_up_to(self, number: int) -> int:
        """Take as many of these as there are; returns how many, a whole number."""
        granted = max(0, min(number, int(self.left)))
        self._tokens -= granted
        return granted

    def overdraw(self, number: float) -> None:
        """Take so many, also if there are fewer: for what is counted after it happened."""
        self._tokens -= number

    def wait_s(self, number: float = 1.0) -> float:
        """How long until there are so many; 0 if there are."""
        if self._tokens >= number:  # the clock is not needed to know
            return 0.0
        self._refill()
        return max(0.0, (number - self._tokens) / self.per_s)

    def _refill(self) -> None:
        now = self._now()
        self._tokens = min(self.burst, self._tokens + max(0.0, now - self._at) * self.per_s)
        self._at = now
