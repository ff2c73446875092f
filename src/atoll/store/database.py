"""Open one database, migrate it, and run statements on it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Row, Table, event, insert, inspect, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from atoll import workers
from atoll.errors import ConflictError, StoreError

MIGRATIONS = Path(__file__).with_name("migrations")
LATEST = "0002"
"""The revision of the last migration."""
_THREAD_S = 0.2
_LOCK = 0x61746F6C6C
"""Advisory lock for the migrations. Servers that start at the same time on one database take turns."""
_TURN = 0x61746F6C
_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}


class Database:
    """One database. An object belongs to one event loop, and every write is committed when its call returns."""

    def __init__(self, url: str) -> None:
        try:
            address = make_url(url)
            backend = address.get_backend_name()
        except (ArgumentError, SQLAlchemyError) as error:
            raise StoreError(
                "database_url is not a database URL", hint="Write postgresql://USER@HOST/NAME."
            ) from error  # the URL itself may contain a password
        if backend not in _DRIVERS:
            raise StoreError(f"a database of kind '{backend}' is not supported", hint="Use SQLite or PostgreSQL.")
        self._is_sqlite = backend == "sqlite"
        options: dict[str, Any] = {} if self._is_sqlite else {"pool_size": 5, "max_overflow": 10, "pool_pre_ping": True}
        options["hide_parameters"] = True  # errors go to the log, and the values may be secret
        self._engine: AsyncEngine = create_async_engine(address.set(drivername=_DRIVERS[backend]), **options)
        if self._is_sqlite:
            event.listen(self._engine.sync_engine, "connect", _prepare_sqlite)

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the SQLite database in this file."""
        return cls(f"sqlite:///{path}")

    async def open(self) -> None:
        """Migrate the tables to the latest version. Raises StoreError if the database cannot be used."""
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
        """Check that the database answers. Raises StoreError if it does not."""
        async with self._begin() as connection:
            await connection.execute(text("SELECT 1"))

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[AsyncConnection]:
        """Run a transaction outside of any account. Other users may wait for it, so it must not wait for its turn on
        the event loop."""
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
        """Run a transaction during which no other one counts or changes what this user has."""
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
                raise ConflictError(f"there is already a {what}") from error
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
    # Importing alembic takes longer than everything else here, and is needed only if there is something to migrate.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
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


async def _ended_threads() -> None:
    """Wait for threads of SQLite connections. If a connection could not be opened, its thread still reports to the
    event loop."""
    for thread in threading.enumerate():
        if "_connection_worker_thread" in thread.name:
            await workers.run(workers.ENGINE, thread.join, _THREAD_S)
