"""The store: the queries and changes that the service needs of its database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Row, delete, func, insert, or_, select, tuple_, update
from sqlalchemy.exc import IntegrityError

from atoll.errors import ConflictError, LimitReachedError, StoreError
from atoll.store.database import Database
from atoll.store.rows import ApiKey, Quotas, Role, StoredSpec, User
from atoll.store.tables import api_keys, specs, users

_KEPT_OVER = 100
"""How many revoked or expired keys of a user are still listed."""
_SAME_NAME = 100


class Store(Database):
    """Users, their keys, and the catalogue of specs."""

    # --- users --------------------------------------------------------------------------------------------------------

    async def add_user(self, user: User) -> None:
        """Add a user. Raise ConflictError if the id is taken."""
        values = {**user.model_dump(exclude={"quotas"}), "role": user.role.value}
        await self._insert(users, {**values, "quotas": user.quotas.model_dump_json()}, f"user {user.id!r}")

    async def user(self, user_id: str) -> User | None:
        found = await self._one(select(users).where(users.c.id == user_id))
        return _user(found) if found is not None else None

    async def user_of(self, identity: str) -> User | None:
        """Return the user whom the identity provider knows by this name."""
        found = await self._one(select(users).where(users.c.identity == identity))
        return _user(found) if found is not None else None

    async def link_user(self, user_id: str, identity: str) -> bool:
        """Link a user to an identity. Raise ConflictError if another user has it. Return False if there is no such
        user."""
        try:
            return await self._write(update(users).where(users.c.id == user_id).values(identity=identity))
        except StoreError as error:
            if isinstance(error.__cause__, IntegrityError):
                raise ConflictError("another user has that identity") from error
            raise

    async def users(self, *, after: str = "", limit: int = 100) -> list[User]:
        """Return users sorted by id."""
        rows = await self._all(select(users).where(users.c.id > after).order_by(users.c.id).limit(limit))
        return [_user(row) for row in rows]

    async def change_user(
        self, user_id: str, *, role: Role | None = None, quotas: Quotas | None = None, disabled: bool | None = None
    ) -> bool:
        """Change what is not None. Return False if there is no such user."""
        values: dict[str, object] = {}
        if role is not None:
            values["role"] = role.value
        if quotas is not None:
            values["quotas"] = quotas.model_dump_json()
        if disabled is not None:
            values["disabled_at"] = datetime.now(UTC) if disabled else None
        if not values:
            return await self.user(user_id) is not None
        return await self._write(update(users).where(users.c.id == user_id).values(**values))

    # --- keys ---------------------------------------------------------------------------------------------------------

    async def add_key(self, key: ApiKey, *, most: int | None = None) -> None:
        """Store a new key. Of the user's revoked and expired keys, only the newest are kept.

        Raise LimitReachedError if the user already has `most` valid keys, and StoreError if the parent key was revoked
        meanwhile.
        """
        now = datetime.now(UTC)
        values = {**key.model_dump(), "scopes": " ".join(key.scopes)}
        async with self._turn(key.user_id) as connection:
            of_user = api_keys.c.user_id == key.user_id
            over = or_(api_keys.c.revoked_at.is_not(None), api_keys.c.expires_at <= now)
            if key.parent_id is not None:
                parent = select(api_keys.c.revoked_at).where(api_keys.c.id == key.parent_id)
                found = (await connection.execute(parent)).first()
                if found is None or found.revoked_at is not None:
                    raise StoreError("the parent key was revoked")
            count = select(func.count()).select_from(api_keys).where(of_user, ~func.coalesce(over, False))
            if most is not None and ((await connection.execute(count)).scalar() or 0) >= most:
                raise LimitReachedError(
                    f"user {key.user_id!r} has {most} keys, which is the limit", hint="Revoke one first."
                )
            await connection.execute(insert(api_keys).values(**values))
            newest = select(api_keys.c.id).where(of_user, over).order_by(api_keys.c.created_at.desc())
            kept = newest.limit(_KEPT_OVER)
            await connection.execute(delete(api_keys).where(of_user, over, api_keys.c.id.not_in(kept)))

    async def key(self, key_id: str) -> ApiKey | None:
        found = await self._one(select(api_keys).where(api_keys.c.id == key_id))
        return _key(found) if found is not None else None

    async def keys(self, user_id: str | None) -> list[ApiKey]:
        """Return the keys of a user, or of all users, newest first."""
        query = select(api_keys).order_by(api_keys.c.created_at.desc(), api_keys.c.id).limit(1000)
        rows = await self._all(query if user_id is None else query.where(api_keys.c.user_id == user_id))
        return [_key(row) for row in rows]

    async def revoke_key(self, key_id: str, user_id: str | None) -> bool:
        """Revoke a key of this user, or of any user, and all keys that were created with it. Return False if it was not
        valid."""
        found = await self.key(key_id)
        if found is None or found.revoked_at is not None or user_id not in (None, found.user_id):
            return False
        async with self._turn(found.user_id) as connection:
            of_user = (api_keys.c.user_id == found.user_id, api_keys.c.revoked_at.is_(None))
            ids, now = [key_id], datetime.now(UTC)
            revoked = 0
            while ids:
                statement = update(api_keys).where(api_keys.c.id.in_(ids), *of_user).values(revoked_at=now)
                revoked += (await connection.execute(statement)).rowcount
                made = select(api_keys.c.id).where(api_keys.c.parent_id.in_(ids), *of_user)
                ids = [row.id for row in (await connection.execute(made)).all()]
        return revoked > 0

    # --- specs --------------------------------------------------------------------------------------------------------

    async def add_spec(self, spec: StoredSpec, *, most: int | None = None) -> None:
        """Add a spec to the catalogue.

        Raise ConflictError if the owner already has a spec of this id or a shared spec has it, and
        LimitReachedError if the owner already has `most` specs.
        """
        owner = spec.owner_id or ""
        async with self._turn(owner) as connection:
            same = select(specs.c.id).where(specs.c.id == spec.id, specs.c.owner_id.in_(("", owner)))
            if (await connection.execute(same)).first() is not None:
                raise ConflictError(f"there is already a spec {spec.id!r}")
            count = select(func.count()).select_from(specs).where(specs.c.owner_id == owner)
            if most is not None and ((await connection.execute(count)).scalar() or 0) >= most:
                raise LimitReachedError(
                    f"user {owner!r} has {most} specs, which is the limit", hint="Delete one first."
                )
            await connection.execute(insert(specs).values(**{**spec.model_dump(), "owner_id": owner}))

    async def spec(self, spec_id: str, owner_id: str | None) -> StoredSpec | None:
        """Return this owner's spec of this id, or the shared one if the owner is None."""
        found = await self._one(select(specs).where(specs.c.id == spec_id, specs.c.owner_id == (owner_id or "")))
        return _spec(found) if found is not None else None

    async def specs_named(self, spec_id: str) -> list[StoredSpec]:
        """Return the specs of all owners that have this id."""
        query = select(specs).where(specs.c.id == spec_id).order_by(specs.c.owner_id).limit(_SAME_NAME)
        return [_spec(row) for row in await self._all(query)]

    async def specs(
        self, *, owner_id: str | None, everybodys: bool, after: tuple[str, str] = ("", ""), limit: int
    ) -> list[StoredSpec]:
        """Return specs sorted by id and owner: this owner's and the shared ones, or all of them with `everybodys`."""
        place = tuple_(specs.c.id, specs.c.owner_id)
        query = select(specs).order_by(specs.c.id, specs.c.owner_id).limit(limit)
        if after != ("", ""):
            query = query.where(place > tuple_(*after))
        if not everybodys:
            query = query.where(or_(specs.c.owner_id == "", specs.c.owner_id == owner_id))
        return [_spec(row) for row in await self._all(query)]

    async def remove_spec(self, spec_id: str, owner_id: str | None) -> bool:
        return await self._write(delete(specs).where(specs.c.id == spec_id, specs.c.owner_id == (owner_id or "")))


def _utc(moment: datetime | None) -> datetime | None:
    """Add the time zone, which SQLite does not store."""
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment


def _user(row: Row[Any]) -> User:
    return User(
        id=row.id,
        role=Role(row.role),
        quotas=Quotas.model_validate_json(row.quotas),
        created_at=_utc(row.created_at) or datetime.now(UTC),
        disabled_at=_utc(row.disabled_at),
        identity=row.identity,
    )


def _key(row: Row[Any]) -> ApiKey:
    return ApiKey(
        id=row.id,
        user_id=row.user_id,
        name=row.name,
        hash=row.hash,
        scopes=tuple(row.scopes.split()),
        created_at=_utc(row.created_at) or datetime.now(UTC),
        expires_at=_utc(row.expires_at),
        revoked_at=_utc(row.revoked_at),
        parent_id=row.parent_id,
    )


def _spec(row: Row[Any]) -> StoredSpec:
    return StoredSpec(
        id=row.id, owner_id=row.owner_id or None, body=row.body, created_at=_utc(row.created_at) or datetime.now(UTC)
    )
