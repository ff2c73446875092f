"""The store: one database, opened and brought up to date, and the few questions that the service asks it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, Table, delete, event, insert, inspect, or_, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from atoll import workers
from atoll.errors import SandboxError
from atoll.store.rows import ApiKey, Quotas, Role, StoredSpec, User
from atoll.store.tables import api_keys, specs, users

_MIGRATIONS = Path(__file__).with_name("migrations")
LATEST = "0001"
"""The last of the migrations."""
_THREAD_S = 0.2
_LOCK = 0x61746F6C6C
"""Two servers that start at once on one database take turns with the migrations."""
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

    async def add_key(self, key: ApiKey) -> None:
        values = {**key.model_dump(), "scopes": " ".join(key.scopes)}
        await self._insert(api_keys, values, f"key {key.id!r}")

    async def key(self, key_id: str) -> ApiKey | None:
        found = await self._one(select(api_keys).where(api_keys.c.id == key_id))
        return _key(found) if found is not None else None

    async def keys(self, user_id: str | None) -> list[ApiKey]:
        """The newest first; None: everybody's."""
        query = select(api_keys).order_by(api_keys.c.created_at.desc(), api_keys.c.id).limit(1000)
        rows = await self._all(query if user_id is None else query.where(api_keys.c.user_id == user_id))
        return [_key(row) for row in rows]

    async def revoke_key(self, key_id: str, user_id: str | None) -> bool:
        """Only of this user, unless None. False: there is none that was still good."""
        statement = update(api_keys).where(api_keys.c.id == key_id, api_keys.c.revoked_at.is_(None))
        if user_id is not None:
            statement = statement.where(api_keys.c.user_id == user_id)
        return await self._write(statement.values(revoked_at=datetime.now(UTC)))

    # --- specs --------------------------------------------------------------------------------------------------------

    async def add_spec(self, spec: StoredSpec) -> None:
        """AlreadyThereError if the id is taken."""
        await self._insert(specs, spec.model_dump(), f"spec {spec.id!r}")

    async def spec(self, spec_id: str) -> StoredSpec | None:
        found = await self._one(select(specs).where(specs.c.id == spec_id))
        return _spec(found) if found is not None else None

    async def specs(self, *, owner_id: str | None, everybodys: bool, after: str, limit: int) -> list[StoredSpec]:
        """By id: those of this owner and those that are everybody's; with `everybodys` all there are."""
        query = select(specs).where(specs.c.id > after).order_by(specs.c.id).limit(limit)
        if not everybodys:
            query = query.where(or_(specs.c.owner_id.is_(None), specs.c.owner_id == owner_id))
        return [_spec(row) for row in await self._all(query)]

    async def remove_spec(self, spec_id: str) -> bool:
        return await self._write(delete(specs).where(specs.c.id == spec_id))

    # --- inside -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[AsyncConnection]:
        try:
            async with self._engine.begin() as connection:
                yield connection
        except (SQLAlchemyError, OSError) as error:
            raise StoreError(f"the database cannot be used: {_words(error)}") from error

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
    )


def _spec(row: Row[Any]) -> StoredSpec:
    return StoredSpec(
        id=row.id, owner_id=row.owner_id, body=row.body, created_at=_utc(row.created_at) or datetime.now(UTC)
    )


async def _ended_threads() -> None:
    """A connection of SQLite that could not be opened has a thread that still reports to this event loop."""
    for thread in threading.enumerate():
        if "_connection_worker_thread" in thread.name:
            await workers.run(workers.ENGINE, thread.join, _THREAD_S)
