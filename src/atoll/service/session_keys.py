"""The session key of a sandbox: made from its id and the server's secret, so that nothing of it needs to be stored.

Whoever has the key may use that one sandbox while it runs. It can be shown again at any time, it is the same after a
restart, and a stolen database holds none.
"""

from __future__ import annotations

import hashlib
import hmac

_PREFIX = "atolls_"
_LONGEST = 256


class SessionKeys:
    def __init__(self, secret: bytes) -> None:
        self._secret = hashlib.sha256(b"atoll session keys\0" + secret).digest()

    def key(self, sandbox_id: str, owner: str | None) -> str:
        mark = hmac.new(self._secret, f"{sandbox_id}\0{owner or ''}".encode(), hashlib.sha256).hexdigest()
        return f"{_PREFIX}{sandbox_id}_{mark}"

    @staticmethod
    def sandbox_id(key: str) -> str | None:
        """The sandbox that it claims to be for. Only `is_good` says whether that is true."""
        if not key.startswith(_PREFIX) or len(key) > _LONGEST or not key.isascii():
            return None
        return key.removeprefix(_PREFIX).rpartition("_")[0] or None

    def is_good(self, key: str, sandbox_id: str, owner: str | None) -> bool:
        return hmac.compare_digest(key.encode(), self.key(sandbox_id, owner).encode())

    def link(self, sandbox_id: str, port: int, until: int) -> str:
        """What stands in a link to one port of one sandbox, good until that moment."""
        text = f"link\0{sandbox_id}\0{port}\0{until}".encode()
        return f"{until}.{hmac.new(self._secret, text, hashlib.sha256).hexdigest()}"

    def is_good_link(self, text: str, sandbox_id: str, port: int, now: float) -> bool:
        until = text.partition(".")[0]
        if not until.isascii() or not until.isdigit() or len(until) > 12 or int(until) < now:
            return False
        return hmac.compare_digest(text.encode(errors="replace"), self.link(sandbox_id, port, int(until)).encode())
