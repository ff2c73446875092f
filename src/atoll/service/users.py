"""Manage users and their API keys."""

from __future__ import annotations

from datetime import UTC, datetime

from atoll.service.caller import Caller, Scope
from atoll.service.credentials import new_api_key
from atoll.service.failures import ForbiddenError, KeyNotFoundError, UserNotFoundError
from atoll.service.identities import Identities
from atoll.store import ApiKey, Quotas, Role, Store, User

ADMIN_USER = "admin"


class UserService:
    """Manages users and keys. Every change takes effect at once on this server, because remembered identities are
    cleared."""

    def __init__(self, store: Store, identities: Identities, *, max_keys: int | None = None) -> None:
        """`max_keys` applies to each user who has no quota of their own."""
        self._store = store
        self._identities = identities
        self._max_keys = max_keys

    async def first_run(self) -> str | None:
        """Create an administrator and a key if there are no users at all. The key is shown only this once."""
        if await self._store.users(limit=1):
            return None
        await self._store.add_user(User(id=ADMIN_USER, role=Role.ADMIN, created_at=datetime.now(UTC)))
        _, text = await self._make_key(ADMIN_USER, "first", frozenset(Scope), None)
        return text

    async def create_key(
        self, caller: Caller, *, user_id: str | None, name: str, scopes: frozenset[Scope], expires_at: datetime | None
    ) -> tuple[ApiKey, str]:
        """Return a new key and its text, which is shown only this once. The key has no more scopes than the caller, and
        expires no later than the caller's credential. Raises LimitReachedError if there are too many."""
        whose = user_id or caller.user_id
        if whose != caller.user_id and not caller.is_admin:
            raise ForbiddenError("only administrators may create keys for others")
        if not scopes <= caller.scopes:
            raise ForbiddenError(f"a key cannot have more scopes than its creator: {', '.join(sorted(caller.scopes))}")
        if expires_at is not None and expires_at <= datetime.now(UTC):
            raise ValueError("expires_at must be in the future")
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
        self._identities.forget()

    async def keys(self, caller: Caller) -> list[ApiKey]:
        return await self._store.keys(caller.owner)

    async def create(self, user_id: str, role: Role, quotas: Quotas) -> User:
        user = User(id=user_id, role=role, quotas=quotas, created_at=datetime.now(UTC))
        await self._store.add_user(user)
        return user

    async def get(self, user_id: str) -> User:
        """Return a user. Raises UserNotFoundError."""
        found = await self._store.user(user_id)
        if found is None:
            raise UserNotFoundError(f"there is no user {user_id[:80]!r}")
        return found

    async def change(self, user_id: str, *, role: Role | None, quotas: Quotas | None, disabled: bool | None) -> User:
        if not await self._store.change_user(user_id, role=role, quotas=quotas, disabled=disabled):
            raise UserNotFoundError(f"there is no user {user_id[:128]!r}")
        self._identities.forget()
        user = await self._store.user(user_id)
        assert user is not None
        return user

    async def link(self, user_id: str, identity: str) -> None:
        """From now on, treat whoever logs in with this identity as this user."""
        if not await self._store.link_user(user_id, identity):
            raise UserNotFoundError(f"there is no user {user_id[:128]!r}")
        self._identities.forget()

    async def list(self, after: str, limit: int) -> list[User]:
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
        key_id, hash, text = new_api_key()
        key = ApiKey(
            id=key_id,
            user_id=user_id,
            name=name,
            hash=hash,
            scopes=tuple(sorted(scopes)),
            created_at=datetime.now(UTC),
            expires_at=expires_at.astimezone(UTC) if expires_at is not None else None,
            parent_id=parent_id,
        )
        await self._store.add_key(key, most=most)
        return key, text
