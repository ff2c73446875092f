"""The store: one database, opened and brought up to date, and the few questions that the service asks it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Connection,
    Row,
    Table,
    delete,
    event,
    func,
    insert,
    inspect,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from atoll import workers
from atoll.errors import LimitReachedError, SandboxError
from atoll.store.rows import ApiKey, Quotas, Role, StoredSpec, User
from atoll.store.tables import api_keys, specs, users

_MIGRATIONS = Path(__file__).with_name("migrations")
LATEST = "0002"
"""The last of the migrations."""
_THREAD_S = 0.2
_LOCK = 0x61746F6C6C
"""Two servers that start at once on one database take turns with the migrations."""
_TURN = 0x61746F6C
_KEPT_OVER = 100
"""So many keys of a user that are revoked or have expired are still listed."""
_SAME_NAME = 100
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}


class StoreError(SandboxError):
    """The database cannot be used. Also what SQLAlchemy and the drivers raise, with their words."""

    code = "store_unavailable"


class AlreadyThereError(StoreError):
    code = "conflict"


class Store:
    """Belongs to one event loop. Every write is committed when its call returns."""

    def __init__(self, url: str) -> None:
        try:
            address = make_url(url)
            backend = address.get_backend_name()
        except (ArgumentError, SQLAlchemyError) as error:
            raise StoreError(f"'{url}' is not a database", hint="Write postgresql://USER@HOST/NAME.") from error
        if backend not in _DRIVERS:
            raise StoreError(f"a database of kind '{backend}' is not supported", hint="Use SQLite or PostgreSQL.")
        self._is_sqlite = backend == "sqlite"
        options: dict[str, Any] = {} if self._is_sqlite else {"pool_size": 5, "max_overflow": 10, "pool_pre_ping": True}
        self._engine: AsyncEngine = create_async_engine(address.set(drivername=_DRIVERS[backend]), **options)
        if self._is_sqlite:
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)

    @classmethod
    def at(cls, path: Path) -> Store:
        """In a file of SQLite."""
        return cls(f"sqlite:///{path}")

    async def open(self) -> None:
        """Bring the tables up to date. Raises StoreError if the database cannot be used."""
        async with self._begin() as connection:
            if self._is_sqlite:
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            await connection.run_sync(_migrate)

    async def aclose(self) -> None:
        await self._engine.dispose()
        if self._is_sqlite:
            await _ended_threads()

    async def ping(self) -> None:
        """Raises StoreError if the database does not answer."""
        async with self._begin() as connection:
            await connection.execute(text("SELECT 1"))

    # --- users --------------------------------------------------------------------------------------------------------

    async def add_user(self, user: User) -> None:
        """AlreadyThereError if the id is taken."""
        values = {**user.model_dump(exclude={"quotas"}), "role": user.role.value}
        await self._insert(users, {**values, "quotas": user.quotas.model_dump_json()}, f"user {user.id!r}")

    async def user(self, user_id: str) -> User | None:
        found = await self._one(select(users).where(users.c.id == user_id))
        return _user(found) if found is not None else None

    async def user_of(self, identity: str) -> User | None:
        """The one whom the identity provider knows by this name."""
        found = await self._one(select(users).where(users.c.identity == identity))
        return _user(found) if found is not None else None

    async def link_user(self, user_id: str, identity: str) -> bool:
        """AlreadyThereError if another user has that identity. False: there is no such user."""
        try:
            return await self._write(update(users).where(users.c.id == user_id).values(identity=identity))
        except StoreError as error:
            if isinstance(error.__cause__, IntegrityError):
                raise AlreadyThereError("another user has that identity") from error
            raise

    async def users(self, *, after: str = "", limit: int = 100) -> list[User]:
        """By id."""
        rows = await self._all(select(users).where(users.c.id > after).order_by(users.c.id).limit(limit))
        return [_user(row) for row in rows]

    async def change_user(
        self, user_id: str, *, role: Role | None = None, quotas: Quotas | None = None, disabled: bool | None = None
    ) -> bool:
        """What is None stays. False: there is no such user."""
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
        """LimitReachedError if the user has so many that are still good, StoreError if the key that it is made with was
        revoked meanwhile. Of those that are over only the newest are kept."""
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
        """The newest first; None: everybody's."""
        query = select(api_keys).order_by(api_keys.c.created_at.desc(), api_keys.c.id).limit(1000)
        rows = await self._all(query if user_id is None else query.where(api_keys.c.user_id == user_id))
        return [_key(row) for row in rows]

    async def revoke_key(self, key_id: str, user_id: str | None) -> bool:
        """Only of this user, unless None, with all that this user made with it. False: there is none that was good."""
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
        """AlreadyThereError if its owner has one of that id, or everybody has; LimitReachedError if it has so many."""
        owner = spec.owner_id or ""
        async with self._turn(owner) as connection:
            same = select(specs.c.id).where(specs.c.id == spec.id, specs.c.owner_id.in_(("", owner)))
            if (await connection.execute(same)).first() is not None:
                raise AlreadyThereError(f"there is already a spec {spec.id!r}")
            count = select(func.count()).select_from(specs).where(specs.c.owner_id == owner)
            if most is not None and ((await connection.execute(count)).scalar() or 0) >= most:
                raise LimitReachedError(
                    f"user {owner!r} has {most} specs, which is the limit", hint="Delete one first."
                )
            await connection.execute(insert(specs).values(**{**spec.model_dump(), "owner_id": owner}))

    async def spec(self, spec_id: str, owner_id: str | None) -> StoredSpec | None:
        """Of this owner; None: everybody's."""
        found = await self._one(select(specs).where(specs.c.id == spec_id, specs.c.owner_id == (owner_id or "")))
        return _spec(found) if found is not None else None

    async def specs_named(self, spec_id: str) -> list[StoredSpec]:
        """Whoever has one of that id, by owner."""
        query = select(specs).where(specs.c.id == spec_id).order_by(specs.c.owner_id).limit(_SAME_NAME)
        return [_spec(row) for row in await self._all(query)]

    async def specs(
        self, *, owner_id: str | None, everybodys: bool, after: tuple[str, str] = ("", ""), limit: int
    ) -> list[StoredSpec]:
        """By id and owner: those of this owner and those that are everybody's; with `everybodys` all there are."""
        place = tuple_(specs.c.id, specs.c.owner_id)
        query = select(specs).order_by(specs.c.id, specs.c.owner_id).limit(limit)
        if after != ("", ""):
            query = query.where(place > tuple_(*after))
        if not everybodys:
            query = query.where(or_(specs.c.owner_id == "", specs.c.owner_id == owner_id))
        return [_spec(row) for row in await self._all(query)]

    async def remove_spec(self, spec_id: str, owner_id: str | None) -> bool:
        return await self._write(delete(specs).where(specs.c.id == spec_id, specs.c.owner_id == (owner_id or "")))

    # --- inside -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[AsyncConnection]:
        """Until its end it is nobody's in particular: others may wait for it, so it does not wait for a turn."""
        who = workers.account.get()
        workers.account.set("")
        try:
            async with self._engine.begin() as connection:
                yield connection
        except (SQLAlchemyError, OSError) as error:
            raise StoreError(f"the database cannot be used: {_words(error)}") from error
        finally:
            workers.account.set(who)

    @asynccontextmanager
    async def _turn(self, user_id: str) -> AsyncIterator[AsyncConnection]:
        """A transaction in which nobody else counts or changes what this user has."""
        async with self._begin() as connection:
            if self._is_sqlite:
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                name = text("SELECT pg_advisory_xact_lock(:lock, hashtext(:user))")
                await connection.execute(name, {"lock": _TURN, "user": user_id})
            yield connection

    async def _insert(self, table: Table, values: Mapping[str, object], what: str) -> None:
        try:
            async with self._begin() as connection:
                await connection.execute(insert(table).values(**values))
        except StoreError as error:
            if isinstance(error.__cause__, IntegrityError):
                raise AlreadyThereError(f"there is already a {what}") from error
            raise

    async def _one(self, query: Any) -> Row[Any] | None:
        async with self._begin() as connection:
            return (await connection.execute(query)).first()

    async def _all(self, query: Any) -> list[Row[Any]]:
        async with self._begin() as connection:
            return list((await connection.execute(query)).all())

    async def _write(self, statement: Any) -> bool:
        async with self._begin() as connection:
            return bool((await connection.execute(statement)).rowcount)


def _prepare_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "busy_timeout = 5000", "foreign_keys = ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _migrate(connection: Connection) -> None:
    if _version(connection) == LATEST:
        return
    # Loading it takes longer than everything else here, and it is needed only when there is something to do.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreError(
            f"the database cannot be brought up to date: {error}", hint="Was it written by a newer version of Atoll?"
        ) from error


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _words(error: BaseException) -> str:
    original = getattr(error, "orig", None) or error
    return str(original).splitlines()[0] if str(original) else type(original).__name__


def _utc(moment: datetime | None) -> datetime | None:
    """SQLite gives back what it was given, without the zone."""
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


async def _ended_threads() -> None:
    """A connection of SQLite that could not be opened has a thread that still reports to this event loop."""
    for thread in threading.enumerate():
        if "_connection_worker_thread" in thread.name:
            await workers.run(workers.ENGINE, thread.join, _THREAD_S)
