"""Requests per second: a bucket of tokens for each user."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.service.identity import Caller
from atoll.service.refusals import RateLimitedError

_MOST_USERS = 100_000


class RateLimiter:
    """A user may save up `burst_s` seconds' worth. None: no limit."""

    def __init__(
        self, default_per_s: float | None, burst_s: float = 2.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._default = default_per_s
        self._burst_s = burst_s
        self._now = now
        self._buckets: dict[str, tuple[float, float]] = {}

    def count(self, caller: Caller) -> None:
        """Raises RateLimitedError."""
        per_s = caller.quotas.requests_per_s or self._default
        if per_s is None:
            return
        now, most = self._now(), max(1.0, per_s * self._burst_s)
        tokens, last = self._buckets.get(caller.user_id, (most, now))
        tokens = min(most, tokens + (now - last) * per_s)
        if tokens < 1:
            self._buckets[caller.user_id] = (tokens, now)
            raise RateLimitedError(f"more than {per_s:g} requests per second", retry_after_s=(1 - tokens) / per_s)
        if len(self._buckets) >= _MOST_USERS:
            self._buckets.clear()  # rather generous for a moment than without bound
        self._buckets[caller.user_id] = (tokens - 1, now)
