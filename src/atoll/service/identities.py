"""Find out who holds a credential.

Results are remembered for a few seconds, and forgotten when anything changes on this server. A key that is revoked on
this server is therefore refused at once, and on other servers within those seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterable
from datetime import UTC, datetime

from atoll.errors import ConflictError
from atoll.service.caller import ORDINARY, Caller, Scope
from atoll.service.credentials import (
    TokenRules,
    Tokens,
    digest,
    identity_of,
    invalid_credential,
    is_api_key,
    is_secret_of,
    key_id_of,
    scopes_in,
)
from atoll.service.failures import NotAuthenticatedError
from atoll.store import ApiKey, Role, Store, User

_REMEMBER_S = 5.0
_MAX_REMEMBERED = 10_000
_MAX_LENGTH = 8192
_MAX_USER_ID = 256
_NO_ISSUER = "provider"
ANY_ISSUER = "*"
"""The issuer of users that were created before identities were stored. The first provider that knows their name takes
them over."""


class Identities:
    def __init__(self, store: Store, secret: bytes, rules: TokenRules | None = None) -> None:
        self._store = store
        self.tokens = Tokens(secret, rules)
        self._known: dict[bytes, tuple[float, float, Caller]] = {}
        self._vouched: dict[tuple[str | None, str | None], float] = {}
        self._standing: dict[tuple[str, str | None, bool], float] = {}
        self._checking = asyncio.Lock()
        self._changes = 0
        """The number of changes so far. A result that was looked up before a change is not remembered after it."""

    async def caller(self, credential: str) -> Caller:
        """Return the caller who holds a credential. Raises NotAuthenticatedError."""
        if len(credential) > _MAX_LENGTH:
            raise invalid_credential()
        mark = hashlib.sha256(credential.encode(errors="surrogateescape")).digest()
        found = self._known.get(mark)
        if found is not None and found[0] > time.monotonic() and found[1] > time.time():
            return found[2]
        is_key, changes = is_api_key(credential), self._changes
        caller, expires = await (self._by_key(credential) if is_key else self._by_token(credential))
        if len(self._known) >= _MAX_REMEMBERED:
            self._known.clear()
        if changes == self._changes:
            self._known[mark] = (time.monotonic() + _REMEMBER_S, expires, caller)
        return caller

    async def check(self, caller: Caller) -> None:
        """Raise NotAuthenticatedError if a caller who was admitted earlier would be refused now."""
        if caller.expires_at is not None and caller.expires_at <= time.time():
            raise NotAuthenticatedError("the credential has expired")
        place, changes = (caller.user_id, caller.key_id, caller.sandbox_id is not None), self._changes
        async with self._checking:  # one at a time: all streams of a user ask at once, and share one answer
            if self._standing.get(place, 0.0) > time.monotonic():
                return
            await self._check(caller)
            if len(self._standing) >= _MAX_REMEMBERED:
                self._standing.clear()
            if changes == self._changes:
                self._standing[place] = time.monotonic() + _REMEMBER_S

    async def _check(self, caller: Caller) -> None:
        if caller.sandbox_id is not None:
            await self.vouch(caller.user_id or None, caller.key_id)
            return
        if caller.key_id is not None:
            key = await self._store.key(caller.key_id)
            if key is None:
                raise invalid_credential()
            self._check_key(key)
        await self._of(caller.user_id, caller.scopes, caller.key_id)

    async def vouch(self, user_id: str | None, key_id: str | None = None) -> None:
        """Check the credential that a derived one comes from: the user, and the key of that user or of an
        administrator. Raise NotAuthenticatedError if the user is locked out or the key has ended."""
        place, changes = (user_id, key_id), self._changes
        if self._vouched.get(place, 0.0) > time.monotonic():
            return
        if user_id is not None:
            await self._enabled(user_id)
        if key_id is not None:
            key = await self._store.key(key_id)
            if key is None:
                raise invalid_credential()
            self._check_key(key)
            holder = await self._enabled(key.user_id)
            if key.user_id != user_id and holder.role is not Role.ADMIN:
                raise invalid_credential()
        if len(self._vouched) >= _MAX_REMEMBERED:
            self._vouched.clear()
        if changes == self._changes:
            self._vouched[place] = time.monotonic() + _REMEMBER_S

    def forget(self) -> None:
        self._changes += 1
        self._known.clear()
        self._vouched.clear()
        self._standing.clear()

    async def _by_key(self, text: str) -> tuple[Caller, float]:
        key_id = key_id_of(text)
        key = await self._store.key(key_id) if key_id is not None else None
        if not is_secret_of(text, key) or key is None:
            raise invalid_credential()
        self._check_key(key)
        expires = key.expires_at.timestamp() if key.expires_at else None
        caller = await self._of(key.user_id, {Scope(scope) for scope in key.scopes}, key.id, expires)
        return caller, float("inf") if expires is None else expires

    async def _by_token(self, token: str) -> tuple[Caller, float]:
        claims = await self.tokens.claims(token)
        scopes = scopes_in(claims)
        key_id = claims.get("key")
        if key_id is not None:
            key = await self._store.key(str(key_id))
            if key is None:
                raise invalid_credential()
            self._check_key(key)
            scopes &= {Scope(scope) for scope in key.scopes}
        user_id = str(claims["sub"])
        if self.tokens.are_foreign:
            user_id = await self._welcome(str(claims.get("iss") or _NO_ISSUER), user_id)
        expires = float(claims["exp"])
        return await self._of(user_id, scopes, str(key_id) if key_id else None, expires), expires

    def _check_key(self, key: ApiKey) -> None:
        if key.revoked_at is not None:
            raise NotAuthenticatedError("the key was revoked")
        if key.expires_at is not None and key.expires_at <= datetime.now(UTC):
            raise NotAuthenticatedError("the key has expired")

    async def _of(
        self, user_id: str, scopes: Iterable[Scope], key_id: str | None, expires_at: float | None = None
    ) -> Caller:
        user = await self._enabled(user_id)
        allowed = ORDINARY | ({Scope.ADMIN} if user.role is Role.ADMIN else set())
        return Caller(user.id, frozenset(scopes) & allowed, user.quotas, key_id=key_id, expires_at=expires_at)

    async def _enabled(self, user_id: str) -> User:
        user = await self._store.user(user_id)
        if user is None or user.disabled_at is not None:
            raise invalid_credential()
        return user

    async def _welcome(self, issuer: str, subject: str) -> str:
        """Return the id of the user whom the identity provider knows by this name.

        An unknown name becomes a new user with the ordinary role. The new id contains the name of the provider, so it
        is never the id of one of this server's own users.
        """
        identity = identity_of(issuer, subject)
        found = await self._store.user_of(identity)
        if found is not None:
            return found.id
        earlier = await self._store.user_of(identity_of(ANY_ISSUER, subject))
        with contextlib.suppress(ConflictError):  # another request was faster
            if earlier is not None:
                await self._store.link_user(earlier.id, identity)
            else:
                user_id = identity if len(identity) <= _MAX_USER_ID else digest(identity)
                await self._store.add_user(User(id=user_id, created_at=datetime.now(UTC), identity=identity))
        found = await self._store.user_of(identity)
        if found is None:  # another user has that id
            raise invalid_credential()
        return found.id
