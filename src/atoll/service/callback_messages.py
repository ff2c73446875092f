"""Messages that programs in a sandbox post to the server. They are kept as events of the sandbox and shown like all
others.

The sender is untrusted code. Messages are therefore bounded in size, number and rate, and displace only older messages.
A message that is too long is cut rather than refused, because a program would send a refused one again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence

from atoll.errors import SandboxNotFoundError
from atoll.manager import Record, SandboxManager
from atoll.model import State
from atoll.printable import printable
from atoll.service.caller import Caller
from atoll.service.failures import NotAuthenticatedError
from atoll.service.identities import Identities
from atoll.service.rates import Rate, Rates
from atoll.service.session_keys import SessionKeys

CALLBACK = "callback"
"""The kind of these events."""
CALLBACK_LABEL = "sandbox_callback"
"""The label of sandboxes whose programs know where to post messages."""
MAX_MESSAGES = 200
"""Maximum number of messages in one request."""
MAX_BODY = 1 << 20
_MAX_MESSAGE = 16 << 10
_MAX_WORD = 80
_MAX_DEPTH = 32
_MAX_KEY = 512


_OF_SANDBOX = Rate("messages", "sandbox", 20.0, 400.0)
_OF_USER = Rate("messages", "user", 50.0, 1000.0)
"""The rate for all sandboxes of one user together, because one thread writes the messages of all users."""


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
        self._rates = Rates(now)

    def variables(self, record: Record, *, url: bool) -> dict[str, str]:
        """Return the environment variables that tell programs inside where to post, under the names of OpenHands's
        agent server."""
        found = {"OH_SESSION_API_KEYS_0": self.inside_key(record)}
        if url:
            found["OH_WEBHOOKS_0_BASE_URL"] = f"{self._public_url}/api/v1/webhooks/{record.id}"
        return found

    def inside_key(self, record: Record) -> str:
        return self._session_keys.inside_key(record.id, record.owner)

    async def admit(self, sandbox_id: str, key: str) -> Caller:
        """Return the caller who holds a key of this sandbox, from inside or outside, while the sandbox runs. Raises the
        same NotAuthenticatedError for any other key."""
        try:
            record = await self._manager.recall(sandbox_id) if len(key) <= _MAX_KEY else None
            if record is not None and self._is_valid(key, record) and record.state is State.RUNNING:
                claims = self._session_keys.claims(key)
                await self._identities.vouch(record.owner, claims[1].key_id if claims else None)
                # The caller has a request rate of its own, so messages cannot use up the owner's.
                return Caller(f"~{record.id}", frozenset(), sandbox_id=record.id)
        except SandboxNotFoundError:
            pass
        raise NotAuthenticatedError("invalid session key", hint="Use the session key of the sandbox while it runs.")

    async def key_inside(self, sandbox_id: str, key: str) -> str | None:
        """Return the key to send inside in place of this session key, so that the session key stays outside. Returns
        None if it is not a key of this sandbox, or if no program inside knows a key."""
        try:
            await self.admit(sandbox_id, key)
        except NotAuthenticatedError:
            return None
        record = await self._manager.recall(sandbox_id)
        return self.inside_key(record) if record is not None and CALLBACK_LABEL in record.labels else None

    async def keep(self, sandbox_id: str, conversation_id: str, messages: Sequence[object]) -> None:
        """Store each message as an event. Raises RateLimitedError if there are too many, and ValueError if there are
        more than one request may contain."""
        if len(messages) > MAX_MESSAGES:
            raise ValueError(f"a request may have at most {MAX_MESSAGES} messages")
        record = await self._manager.recall(sandbox_id)
        number = max(1, len(messages))
        owner = record.owner or "" if record is not None else ""
        self._rates.take((_OF_SANDBOX, sandbox_id, number), (_OF_USER, owner, number))
        if messages:
            events = [_event(conversation_id, message) for message in messages]
            await self._manager.report(sandbox_id, CALLBACK, events)

    def _is_valid(self, key: str, record: Record) -> bool:
        inside = self._session_keys.is_inside_key(key, record.id, record.owner)
        claims = self._session_keys.claims(key)
        own = claims is not None and claims[0] == record.id
        return inside or (own and self._session_keys.is_valid(key, record.owner, time.time()))


def _event(conversation_id: str, message: object) -> tuple[str, str]:
    """Return the reason and the data of the event."""
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
    """Return a copy that every JSON reader accepts: no surrogates, no infinite numbers, not nested too deeply."""
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
