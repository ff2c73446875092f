"""Limits on what one user may ask of the server: requests per second, concurrent requests, and bytes held in memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from atoll import buffers
from atoll.buffers import Budgets, Reservation
from atoll.service import Caller, RateLimitedError
from atoll.token_bucket import TokenBucket
from atoll.workers import account

_PLACE = "atoll.admission"
_MAX_USERS = 100_000


class RateLimiter:
    """Limits the requests per second of each user, who may save up `burst_s` seconds' worth. None means no limit."""

    def __init__(
        self, default_per_s: float | None, burst_s: float = 2.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._default = default_per_s
        self._burst_s = burst_s
        self._now = now
        self._buckets: dict[str, TokenBucket] = {}

    def count(self, caller: Caller) -> None:
        """Count one request. Raises RateLimitedError."""
        per_s = caller.quotas.requests_per_s or self._default
        if per_s is None:
            return
        bucket = self._bucket(caller.user_id, per_s, max(1.0, per_s * self._burst_s))
        if not bucket.take():
            raise RateLimitedError(f"more than {per_s:g} requests per second", retry_after_s=bucket.wait_s())

    def _bucket(self, user_id: str, per_s: float, burst: float) -> TokenBucket:
        bucket = self._buckets.get(user_id)
        if bucket is None:
            if len(self._buckets) >= _MAX_USERS:
                self._buckets.clear()  # better too generous for a moment than unbounded
            bucket = self._buckets[user_id] = TokenBucket(per_s, burst, self._now)
        elif bucket.per_s != per_s:
            bucket.limit(per_s, burst)
        return bucket


class Admissions:
    def __init__(self, max_requests: int, budgets: Budgets) -> None:
        self._max_requests = max_requests
        self.budgets = budgets
        self.under_way: Counter[str] = Counter()
        """Number of open requests and WebSockets of each user."""

    def admit(self, scope: Scope, caller: Caller) -> None:
        """Attribute the request to this caller until `leave` is called. Raises RateLimitedError."""
        user = caller.user_id
        if self.under_way[user] >= self._max_requests:
            raise RateLimitedError(
                f"user {user!r} has {self._max_requests} requests in progress, which is the limit",
                retry_after_s=1,
                hint="Wait for some of them to finish.",
            )
        self.under_way[user] += 1
        scope[_PLACE] = admission = Admission(caller, self.budgets.open(user))
        account.set(user)
        buffers.reservation.set(admission.reservation)

    def leave(self, scope: Scope) -> None:
        admission = scope.pop(_PLACE, None)
        if isinstance(admission, Admission):
            admission.reservation.close()
            user = admission.caller.user_id
            self.under_way[user] -= 1
            if not self.under_way[user]:
                del self.under_way[user]


class Admission:
    """The caller of one request, and the memory that it reserves."""

    def __init__(self, caller: Caller, reservation: Reservation) -> None:
        self.caller, self.reservation = caller, reservation


def admission_of(scope: Scope) -> Admission | None:
    found = scope.get(_PLACE)
    return found if isinstance(found, Admission) else None


class AdmissionEnd:
    """A pure ASGI middleware that releases what a request was admitted to take, when its answer is complete."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            if scope["type"] in ("http", "websocket"):
                made = getattr(scope["app"].state, "services", None)
                if made is not None:
                    made.admissions.leave(scope)
