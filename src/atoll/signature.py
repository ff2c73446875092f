"""Signatures of a server's messages, which prove their sender and time and prevent replays.

The header is `Atoll-Signature: t=SECONDS,id=RANDOM,v1=HEX`, where HEX is the HMAC-SHA256 of `SECONDS.RANDOM.BODY` with
a secret that only the two sides know. A message is accepted once, and only within `WINDOW_S` seconds of its time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable

from atoll.errors import SignatureError as SignatureError

HEADER = "Atoll-Signature"
WINDOW_S = 300.0
_FORM = re.compile(r"t=(\d{1,12}),id=([0-9a-f]{32}),v1=([0-9a-f]{64})")
_MAX_SEEN = 100_000


def sign(secret: bytes, body: bytes, now: float | None = None) -> str:
    """Return the value of the header, which is different for every call."""
    moment, id = str(int(time.time() if now is None else now)), secrets.token_hex(16)
    return f"t={moment},id={id},v1={_mark(secret, moment, id, body)}"


class Verifier:
    """Checks signatures. It remembers the ids of messages until they are too old to be accepted again."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self._clock = clock
        self._seen: dict[str, float] = {}

    def check(self, signature: str, body: bytes) -> None:
        """Check the signature of a message. Raises SignatureError."""
        match = _FORM.fullmatch(signature)
        moment, id, mark = match.groups() if match else ("0", "", "")
        # Compare even if the signature is malformed, and before any other check, so that timing reveals nothing.
        good = hmac.compare_digest(_mark(self._secret, moment, id, body), mark)
        if match is None or not good:
            raise SignatureError("invalid signature")
        now = self._clock()
        if abs(now - int(moment)) > WINDOW_S:
            raise SignatureError("the message is too old, or from the future", hint="Check the clocks of both sides.")
        self._forget(now)
        if id in self._seen:
            raise SignatureError("this message was already received (replay)")
        if len(self._seen) >= _MAX_SEEN:
            raise SignatureError("too many messages came at once")
        self._seen[id] = int(moment) + WINDOW_S

    def _forget(self, now: float) -> None:
        for id in [id for id, until in self._seen.items() if until < now]:
            del self._seen[id]


def _mark(secret: bytes, moment: str, id: str, body: bytes) -> str:
    return hmac.new(secret, f"{moment}.{id}.".encode() + body, hashlib.sha256).hexdigest()
