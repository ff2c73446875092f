"""How much one user may ask for at a time: requests that are under way, and bytes that wait in memory for them."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from atoll import buffers
from atoll.buffers import Budgets, Holding
from atoll.service import Caller, RateLimitedError
from atoll.workers import account

_PLACE = "atoll.admission"


class Admissions:
    def __init__(self, max_requests: int, budgets: Budgets) -> None:
        self._max_requests = max_requests
        self.budgets = budgets
        self.under_way: Counter[str] = Counter()
        """Requests and WebSockets, by user."""

    def admit(self, scope: Scope, caller: Caller) -> None:
        """From here on the request is the caller's, until `leave`. Raises RateLimitedError."""
        user = caller.user_id
        if self.under_way[user] >= self._max_requests:
            raise RateLimitedError(
                f"user {user!r} has {self._max_requests} requests under way, which is the limit",
                retry_after_s=1,
                hint="Wait for some of them to finish.",
            )
        self.under_way[user] += 1
        scope[_PLACE] = admission = Admission(caller, self.budgets.open(user))
        account.set(user)
        buffers.holding.set(admission.holding)

    def leave(self, scope: Scope) -> None:
        admission = scope.pop(_PLACE, None)
        if isinstance(admission, Admission):
            admission.holding.close()
            user = admission.caller.user_id
            self.under_way[user] -= 1
            if not self.under_way[user]:
                del self.under_way[user]


class Admission:
    """Of one request."""

    def __init__(self, caller: Caller, holding: Holding) -> None:
        self.caller, self.holding = caller, holding


def admission_of(scope: Scope) -> Admission | None:
    found = scope.get(_PLACE)
    return found if isinstance(found, Admission) else None


class Leaving:
    """A pure ASGI middleware: what was admitted inside of it ends with it, answer and all."""

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
