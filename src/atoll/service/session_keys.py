"""The session key of a sandbox, derived from its id and the server's secret, so that nothing needs to be stored.

A session key allows the use of that one sandbox while it runs. It can be shown again at any time, it is the same after
a restart, and a stolen database contains none. A key, like a link to a port, names the credential that it was shown to,
and ends with that credential.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass

_PREFIX = "atolls_"
_INSIDE_PREFIX = "atollc_"
_MAX_LENGTH = 256
_KEY = re.compile(r"(?P<sandbox>[A-Za-z0-9_-]{1,64})_(?P<key>[0-9a-f]{0,32})\.(?P<until>[0-9]{0,12})_[0-9a-f]{64}")
_LINK = re.compile(r"(?P<until>[0-9]{1,12})\.(?P<key>[0-9a-f]{0,32})\.[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Grant:
    """The credential that a session key or link was shown to, and with which it ends."""

    key_id: str | None = None
    """The API key behind it."""
    until: int | None = None
    """When it expires, in seconds since the epoch."""


class SessionKeys:
    def __init__(self, secret: bytes) -> None:
        self._secret = hashlib.sha256(b"atoll session keys\0" + secret).digest()

    def key(self, sandbox_id: str, owner: str | None, grant: Grant) -> str:
        head = f"{sandbox_id}_{grant.key_id or ''}.{'' if grant.until is None else grant.until}"
        return f"{_PREFIX}{head}_{self._mark('key', head, owner or '')}"

    @staticmethod
    def claims(key: str) -> tuple[str, Grant] | None:
        """Return the sandbox and the credential that the key claims to be for. Only `is_valid` verifies them."""
        found = _KEY.fullmatch(key.removeprefix(_PREFIX)) if len(key) <= _MAX_LENGTH else None
        if found is None or not key.startswith(_PREFIX):
            return None
        return found["sandbox"], _grant(found)

    def is_valid(self, key: str, owner: str | None, now: float) -> bool:
        claims = self.claims(key)
        if claims is None or (claims[1].until is not None and claims[1].until < now):
            return False
        return hmac.compare_digest(key.encode(), self.key(claims[0], owner, claims[1]).encode())

    def inside_key(self, sandbox_id: str, owner: str | None) -> str:
        """Return the key for programs inside a sandbox. It is valid only for messages to the server about that sandbox,
        so it is of no other use if it is stolen."""
        return f"{_INSIDE_PREFIX}{sandbox_id}_{self._mark('inside', sandbox_id, owner or '')}"

    def is_inside_key(self, key: str, sandbox_id: str, owner: str | None) -> bool:
        return hmac.compare_digest(key.encode(), self.inside_key(sandbox_id, owner).encode())

    def link(self, sandbox_id: str, port: int, grant: Grant) -> str:
        """Return the signed part of a link to one port of one sandbox. A link always expires."""
        head = f"{grant.until or 0}.{grant.key_id or ''}"
        return f"{head}.{self._mark('link', sandbox_id, str(port), head)}"

    def link_grant(self, text: str, sandbox_id: str, port: int, now: float) -> Grant | None:
        """Return the credential that a link was given to, or None if the link is invalid or has expired."""
        found = _LINK.fullmatch(text)
        if found is None or int(found["until"]) < now:
            return None
        grant = _grant(found)
        expected = self.link(sandbox_id, port, grant)
        return grant if hmac.compare_digest(text.encode(), expected.encode()) else None

    def _mark(self, *parts: str) -> str:
        return hmac.new(self._secret, "\0".join(parts).encode(), hashlib.sha256).hexdigest()


def _grant(found: re.Match[str]) -> Grant:
    return Grant(found["key"] or None, int(found["until"]) if found["until"] else None)
