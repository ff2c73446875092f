"""Keys and tokens: making them, and finding out who holds one.

An API key is `atoll_ID_SECRET`; only the hash of the secret is stored, which is enough for a secret of 256 random bits.
A token is a JWT. Its algorithm is fixed by the server's settings, never taken from the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import jwt

from atoll import workers
from atoll.service.identity import ORDINARY, Caller, Scope
from atoll.service.refusals import ForbiddenError, KeyNotFoundError, NotAuthenticatedError, UserNotFoundError
from atoll.store import AlreadyThereError, ApiKey, Quotas, Role, Store, User

_PREFIX = "atoll_"
_REMEMBER_S = 5.0
_MOST_REMEMBERED = 10_000
_LONGEST = 8192
_LEEWAY_S = 5
_LONGEST_USER = 256
_LONGEST_IDENTITY = 600
_NO_ISSUER = "provider"
ANY_ISSUER = "*"
"""Of users from before identities were stored: the first provider that knows the name takes the record over."""
ADMIN_USER = "admin"


@dataclass(frozen=True, slots=True)
class TokenRules:
    """How tokens are checked: with a secret of our own (HS256), or with the public keys of an identity provider."""

    algorithm: str = "HS256"
    audience: str = "atoll"
    issuer: str | None = None
    public_key: str | None = None
    jwks_url: str | None = None
    max_lifetime_s: float = 86400.0


class Identities:
    """Who holds a credential. What was found out is remembered for some seconds, and forgotten when anything changes
    here, so a key that is revoked on this server is refused at once, and elsewhere within those seconds."""

    def __init__(
        self, store: Store, secret: bytes, rules: TokenRules | None = None, *, max_keys: int | None = None
    ) -> None:
        """`max_keys` holds for each user who has no quota of their own."""
        self._store = store
        self._max_keys = max_keys
        self._secret = hashlib.sha256(b"atoll tokens\0" + secret).digest()
        self._rules = rules or TokenRules()
        self._known: dict[bytes, tuple[float, float, Caller]] = {}
        self._vouched: dict[tuple[str | None, str | None], float] = {}
        self._standing: dict[tuple[str, str | None, bool], float] = {}
        self._checking = asyncio.Lock()
        self._changes = 0
        """What was looked up before a change is not remembered after it."""
        self._provider = jwt.PyJWKClient(self._rules.jwks_url, timeout=10) if self._rules.jwks_url else None

    # --- finding out ----------------------------------------------------------------------------------------------

    async def caller(self, credential: str) -> Caller:
        """Raises NotAuthenticatedError."""
        if len(credential) > _LONGEST:
            raise _not_good()
        mark = hashlib.sha256(credential.encode(errors="surrogateescape")).digest()
        found = self._known.get(mark)
        if found is not None and found[0] > time.monotonic() and found[1] > time.time():
            return found[2]
        is_key, changes = credential.startswith(_PREFIX), self._changes
        caller, expires = await (self._by_key(credential) if is_key else self._by_token(credential))
        if len(self._known) >= _MOST_REMEMBERED:
            self._known.clear()
        if changes == self._changes:
            self._known[mark] = (time.monotonic() + _REMEMBER_S, expires, caller)
        return caller

    async def check(self, caller: Caller) -> None:
        """Whether somebody who was let in earlier still would be. Raises NotAuthenticatedError."""
        if caller.expires_at is not None and caller.expires_at <= time.time():
            raise NotAuthenticatedError("the credential has expired")
        place, changes = (caller.user_id, caller.key_id, caller.sandbox_id is not None), self._changes
        async with self._checking:  # one at a time: all streams of a user ask at once, and one answer is for all
            if self._standing.get(place, 0.0) > time.monotonic():
                return
            await self._check(caller)
            if len(self._standing) >= _MOST_REMEMBERED:
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
                raise _not_good()
            self._check_key(key)
        await self._of(caller.user_id, caller.scopes, caller.key_id)

    async def vouch(self, user_id: str | None, key_id: str | None = None) -> None:
        """For what was derived from a user's right, with a key of theirs or of an administrator's. Raises
        NotAuthenticatedError if the user is locked out or the key has ended."""
        place, changes = (user_id, key_id), self._changes
        if self._vouched.get(place, 0.0) > time.monotonic():
            return
        if user_id is not None:
            await self._enabled(user_id)
        if key_id is not None:
            key = await self._store.key(key_id)
            if key is None:
                raise _not_good()
            self._check_key(key)
            holder = await self._enabled(key.user_id)
            if key.user_id != user_id and holder.role is not Role.ADMIN:
                raise _not_good()
        if len(self._vouched) >= _MOST_REMEMBERED:
            self._vouched.clear()
        if changes == self._changes:
            self._vouched[place] = time.monotonic() + _REMEMBER_S

    def forget(self) -> None:
        self._changes += 1
        self._known.clear()
        self._vouched.clear()
        self._standing.clear()

    async def _by_key(self, text: str) -> tuple[Caller, float]:
        key_id, _, secret = text.removeprefix(_PREFIX).partition("_")
        key = await self._store.key(key_id) if key_id.isalnum() and len(key_id) <= 32 else None
        good = hmac.compare_digest(_hash(secret), key.hash if key is not None else bytes(32))
        if key is None or not good:
            raise _not_good()
        self._check_key(key)
        expires = key.expires_at.timestamp() if key.expires_at else None
        caller = await self._of(key.user_id, {Scope(scope) for scope in key.scopes}, key.id, expires)
        return caller, float("inf") if expires is None else expires

    async def _by_token(self, token: str) -> tuple[Caller, float]:
        claims = await self._claims(token)
        scopes = _scopes_in(claims)
        key_id = claims.get("key")
        if key_id is not None:
            key = await self._store.key(str(key_id))
            if key is None:
                raise _not_good()
            self._check_key(key)
            scopes &= {Scope(scope) for scope in key.scopes}
        user_id = str(claims["sub"])
        if self._rules.algorithm != "HS256":
            user_id = await self._welcome(str(claims.get("iss") or _NO_ISSUER), user_id)
        expires = float(claims["exp"])
        return await self._of(user_id, scopes, str(key_id) if key_id else None, expires), expires

    async def _claims(self, token: str) -> dict[str, Any]:
        rules = self._rules
        try:
            key: Any = self._secret
            if self._provider is not None:
                key = (await workers.run(workers.IDENTITY, self._provider.get_signing_key_from_jwt, token)).key
            elif rules.algorithm != "HS256":
                key = rules.public_key
            return jwt.decode(
                token,
                key,
                algorithms=[rules.algorithm],
                audience=rules.audience,
                issuer=rules.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "sub", "aud"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise NotAuthenticatedError("the token has expired", hint="Get a new one.") from error
        except (jwt.PyJWTError, ValueError) as error:
            raise _not_good() from error

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
            raise _not_good()
        return user

    async def _welcome(self, issuer: str, subject: str) -> str:
        """The id of the user here whom the identity provider knows by that name. Somebody new becomes a user without
        any role, whose id tells the provider, so that no name it gives is one of this server's own users."""
        identity = identity_of(issuer, subject)
        found = await self._store.user_of(identity)
        if found is not None:
            return found.id
        earlier = await self._store.user_of(identity_of(ANY_ISSUER, subject))
        with contextlib.suppress(AlreadyThereError):  # another request was faster
            if earlier is not None:
                await self._store.link_user(earlier.id, identity)
            else:
                user_id = identity if len(identity) <= _LONGEST_USER else _digest(identity)
                await self._store.add_user(User(id=user_id, created_at=datetime.now(UTC), identity=identity))
        found = await self._store.user_of(identity)
        if found is None:  # somebody else here is called so
            raise _not_good()
        return found.id

    # --- making ---------------------------------------------------------------------------------------------------

    async def first_run(self) -> str | None:
        """An administrator and a key for them, if there is no user at all. The only time the key is seen."""
        if await self._store.users(limit=1):
            return None
        await self._store.add_user(User(id=ADMIN_USER, role=Role.ADMIN, created_at=datetime.now(UTC)))
        _, text = await self._make_key(ADMIN_USER, "first", frozenset(Scope), None)
        return text

    async def create_key(
        self, caller: Caller, *, user_id: str | None, name: str, scopes: frozenset[Scope], expires_at: datetime | None
    ) -> tuple[ApiKey, str]:
        """The key, and its text, which is never seen again. It can do no more than the caller, and lives no longer
        than what the caller has shown. LimitReachedError if there are too many."""
        whose = user_id or caller.user_id
        if whose != caller.user_id and not caller.is_admin:
            raise ForbiddenError("only administrators make keys for others")
        if not scopes <= caller.scopes:
            raise ForbiddenError(f"a key cannot have more scopes than its maker: {', '.join(sorted(caller.scopes))}")
        if expires_at is not None and expires_at <= datetime.now(UTC):
            raise ValueError("a key cannot have expired before it is made")
        if caller.expires_at is not None:
            own = datetime.fromtimestamp(caller.expires_at, UTC)
            expires_at = own if expires_at is None else min(expires_at, own)
        user = await self._store.user(whose)
        if user is None:
            raise UserNotFoundError(f"there is no user {whose!r}")
        most = self._max_keys if user.quotas.max_keys is None else user.quotas.max_keys
        return await self._make_key(whose, name, scopes, expires_at, parent_id=caller.key_id, most=most)

    async def revoke_key(self, caller: Caller, key_id: str) -> None:
        if not await self._store.revoke_key(key_id, caller.owner):
            raise KeyNotFoundError(f"there is no key {key_id[:64]!r}")
        self.forget()

    async def keys(self, caller: Caller) -> list[ApiKey]:
        return await self._store.keys(caller.owner)

    def create_token(self, caller: Caller, *, scopes: frozenset[Scope], lifetime_s: float) -> tuple[str, datetime]:
        """For a while, with no more scopes than the caller; it ends with the key that it was made with."""
        if self._rules.algorithm != "HS256":
            raise ForbiddenError("tokens come from the identity provider")
        if not scopes <= caller.scopes:
            raise ForbiddenError(f"a token cannot have more scopes than its maker: {', '.join(sorted(caller.scopes))}")
        now = datetime.now(UTC)
        expires = now + timedelta(seconds=min(lifetime_s, self._rules.max_lifetime_s))
        if caller.expires_at is not None:
            expires = min(expires, datetime.fromtimestamp(caller.expires_at, UTC))
        claims: dict[str, object] = {
            "sub": caller.user_id,
            "aud": self._rules.audience,
            "iat": now,
            "exp": expires,
            "scope": " ".join(sorted(scopes)),
        }
        if caller.key_id is not None:
            claims["key"] = caller.key_id
        if self._rules.issuer is not None:
            claims["iss"] = self._rules.issuer
        return jwt.encode(claims, self._secret, algorithm="HS256"), expires

    async def create_user(self, user_id: str, role: Role, quotas: Quotas) -> User:
        user = User(id=user_id, role=role, quotas=quotas, created_at=datetime.now(UTC))
        await self._store.add_user(user)
        return user

    async def change_user(
        self, user_id: str, *, role: Role | None, quotas: Quotas | None, disabled: bool | None
    ) -> User:
        if not await self._store.change_user(user_id, role=role, quotas=quotas, disabled=disabled):
            raise UserNotFoundError(f"there is no user {user_id[:128]!r}")
        self.forget()
        user = await self._store.user(user_id)
        assert user is not None
        return user

    async def link_user(self, user_id: str, identity: str) -> None:
        """From now on whoever the provider knows by that name is this user."""
        if not await self._store.link_user(user_id, identity):
            raise UserNotFoundError(f"there is no user {user_id[:128]!r}")
        self.forget()

    async def users(self, after: str, limit: int) -> list[User]:
        return await self._store.users(after=after, limit=limit)

    async def _make_key(
        self,
        user_id: str,
        name: str,
        scopes: frozenset[Scope],
        expires_at: datetime | None,
        *,
        parent_id: str | None = None,
        most: int | None = None,
    ) -> tuple[ApiKey, str]:
        key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        key = ApiKey(
            id=key_id,
            user_id=user_id,
            name=name,
            hash=_hash(secret),
            scopes=tuple(sorted(scopes)),
            created_at=datetime.now(UTC),
            expires_at=expires_at.astimezone(UTC) if expires_at is not None else None,
            parent_id=parent_id,
        )
        await self._store.add_key(key, most=most)
        return key, f"{_PREFIX}{key_id}_{secret}"


def identity_of(issuer: str, subject: str) -> str:
    """One name for each user of each provider."""
    identity = f"{issuer.replace('%', '%25').replace('|', '%7C')}|{subject}"
    return identity if len(identity) <= _LONGEST_IDENTITY and identity.isprintable() else _digest(identity)


def _digest(identity: str) -> str:
    return f"~{hashlib.sha256(identity.encode(errors='replace')).hexdigest()}"


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()


def _scopes_in(claims: dict[str, Any]) -> set[Scope]:
    """Of the claim `scope`; without it what a user ordinarily has. Words that are not ours mean nothing here."""
    words = claims.get("scope")
    if not isinstance(words, str):
        return set(ORDINARY)
    return {Scope(word) for word in words.split() if word in set(Scope)}


def _not_good() -> NotAuthenticatedError:
    return NotAuthenticatedError("invalid credential", hint="Send 'Authorization: Bearer' with a key or token.")
