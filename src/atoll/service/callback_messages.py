"""Messages that programs in a sandbox post to the server: kept as events of that sandbox, shown like any others.

Whoever posts is untrusted code. Messages are bounded in size, number and rate, displace nothing but older messages, and
what is too long is cut rather than refused: a program that is refused would send the same again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.errors import SandboxNotFoundError
from atoll.manager import Record, SandboxManager
from atoll.model import State
from atoll.printable import printable
from atoll.service.caller import Caller
from atoll.service.failures import NotAuthenticatedError, RateLimitedError
from atoll.service.identities import Identities
from atoll.service.session_keys import SessionKeys
from atoll.token_bucket import TokenBucket

CALLBACK = "callback"
"""The kind of these events."""
CALLBACK_LABEL = "sandbox_callback"
"""The label of sandboxes that know where to post."""
MAX_MESSAGES = 200
"""The most in one request."""
MAX_BODY = 1 << 20
_MAX_MESSAGE = 16 << 10
_MAX_BUCKETS = 10_000
_MAX_WORD = 80
_MAX_DEPTH = 32
_MAX_KEY = 512


@dataclass(frozen=True, slots=True)
class _Rate:
    """So many messages per second, and so many at once after a while without any."""

    of: str
    per_s: float
    burst: float


_OF_SANDBOX = _Rate("sandbox", 20.0, 400.0)
_OF_USER = _Rate("user", 50.0, 1000.0)
"""For all sandboxes of one user together: messages of all users are written by one thread."""


class Callbacks:
    def __init__(
        self,
        manager: SandboxManager,
        session_keys: SessionKeys,
        identities: Identities,
        public_url: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager = manager
        self._session_keys = session_keys
        self._identities = identities
        self._public_url = public_url.rstrip("/")
        self._now = now
        self._buckets: dict[tuple[_Rate, str], TokenBucket] = {}

    def variables(self, record: Record, *, url: bool) -> dict[str, str]:
        """What programs inside find in their environment, by the names that OpenHands's agent server has for it."""
        found = {"OH_SESSION_API_KEYS_0": self.inside_key(record)}
        if url:
            found["OH_WEBHOOKS_0_BASE_URL"] = f"{self._public_url}/api/v1/webhooks/{record.id}"
        return found

    def inside_key(self, record: Record) -> str:
        return self._session_keys.inside_key(record.id, record.owner)

    async def admit(self, sandbox_id: str, key: str) -> Caller:
        """Whoever holds the key of this sandbox, from inside or outside, while it runs. Anybody else gets the same
        NotAuthenticatedError."""
        try:
            record = await self._manager.recall(sandbox_id) if len(key) <= _MAX_KEY else None
            if record is not None and self._is_valid(key, record) and record.state is State.RUNNING:
                claims = self._session_keys.claims(key)
                await self._identities.vouch(record.owner, claims[1].key_id if claims else None)
                # It has a rate of its own: messages cannot use up the owner's.
                return Caller(f"~{record.id}", frozenset(), sandbox_id=record.id)
        except SandboxNotFoundError:
            pass
        raise NotAuthenticatedError("invalid session key", hint="Use the session key of the sandbox while it runs.")

    async def key_inside(self, sandbox_id: str, key: str) -> str | None:
        """What to send inside instead of this session key, so that ours never gets there. None: it is not one of this
        sandbox, or nothing inside knows a key."""
        try:
            await self.admit(sandbox_id, key)
        except NotAuthenticatedError:
            return None
        record = await self._manager.recall(sandbox_id)
        return self.inside_key(record) if record is not None and CALLBACK_LABEL in record.labels else None

    async def keep(self, sandbox_id: str, conversation_id: str, messages: Sequence[object]) -> None:
        """Make each of them an event. RateLimitedError for too many; ValueError for more than one request may have."""
        if len(messages) > MAX_MESSAGES:
            raise ValueError(f"a request may have at most {MAX_MESSAGES} messages")
        record = await self._manager.recall(sandbox_id)
        number = max(1, len(messages))
        places = [(_OF_SANDBOX, sandbox_id), (_OF_USER, record.owner or "" if record is not None else "")]
        for place in places:
            self._need(place, number)
        for place in places:
            self._bucket(place).take(number)
        if messages:
            events = [_event(conversation_id, message) for message in messages]
            await self._manager.report(sandbox_id, CALLBACK, events)

    def _is_valid(self, key: str, record: Record) -> bool:
        inside = self._session_keys.is_inside_key(key, record.id, record.owner)
        claims = self._session_keys.claims(key)
        own = claims is not None and claims[0] == record.id
        return inside or (own and self._session_keys.is_valid(key, record.owner, time.time()))

    def _need(self, place: tuple[_Rate, str], number: int) -> None:
        rate, wait_s = place[0], self._bucket(place).wait_s(number)
        if wait_s > 0:
            raise RateLimitedError(
                f"more than {rate.per_s:g} messages per second from one {rate.of}", retry_after_s=math.ceil(wait_s)
            )

    def _bucket(self, place: tuple[_Rate, str]) -> TokenBucket:
        found = self._buckets.get(place)
        if found is None:
            if len(self._buckets) >= _MAX_BUCKETS:
                self._buckets = {each: bucket for each, bucket in self._buckets.items() if not bucket.is_full()}
            rate = place[0]
            found = self._buckets[place] = TokenBucket(rate.per_s, rate.burst, self._now)
        return found


def _event(conversation_id: str, message: object) -> tuple[str, str]:
    """Its reason and its data."""
    message = _plain(message, _MAX_DEPTH)
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=True)
    kind = message.get("kind") if isinstance(message, dict) else None
    word = printable(kind[:_MAX_WORD], instead="") if isinstance(kind, str) else ""
    reason = f"conversation {conversation_id}: {word or 'message'}"
    if len(body) <= _MAX_MESSAGE:
        return reason, f'{{"conversation_id":{json.dumps(conversation_id)},"message":{body}}}'
    cut = {"conversation_id": conversation_id, "truncated": True, "text": body[:_MAX_MESSAGE]}
    return reason, json.dumps(cut, separators=(",", ":"))


def _plain(value: object, depth: int) -> object:
    """A copy that every reader of JSON understands: no surrogates, no infinite numbers, not too deep."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        return "…"
    if isinstance(value, list):
        return [_plain(item, depth - 1) for item in value]
    return {str(_plain(name, 0)): _plain(item, depth - 1) for name, item in value.items()}
