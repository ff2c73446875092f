"""Rates of what programs in sandboxes send: so much of one sandbox, and so much of all sandboxes of one user."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from atoll.service.failures import RateLimitedError
from atoll.token_bucket import TokenBucket

_MAX_BUCKETS = 10_000


@dataclass(frozen=True, slots=True)
class Rate:
    """How many of something per second are accepted, and how many at once after a pause."""

    things: str
    of: str
    per_s: float
    burst: float


class Rates:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._buckets: dict[tuple[Rate, str], TokenBucket] = {}

    def take(self, *wanted: tuple[Rate, str, float]) -> None:
        """Count so many for each rate and whom it applies to: all, or none if one of them is too many. Raises
        RateLimitedError."""
        for rate, whom, number in wanted:
            wait_s = self._bucket(rate, whom).wait_s(min(number, rate.burst))
            if wait_s > 0:
                raise RateLimitedError(
                    f"more than {rate.per_s:g} {rate.things} per second from one {rate.of}",
                    retry_after_s=math.ceil(wait_s),
                )
        for rate, whom, number in wanted:
            self._bucket(rate, whom).overdraw(number)

    def _bucket(self, rate: Rate, whom: str) -> TokenBucket:
        found = self._buckets.get((rate, whom))
        if found is None:
            if len(self._buckets) >= _MAX_BUCKETS:
                self._buckets = {each: bucket for each, bucket in self._buckets.items() if not bucket.is_full()}
            found = self._buckets[rate, whom] = TokenBucket(rate.per_s, rate.burst, self._now)
        return found
