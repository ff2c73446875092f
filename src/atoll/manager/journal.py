"""The manager's records and events, in a SQLite database that only one thread uses.

Writes that wait at the same time become one transaction. When a write is reported as done, the kernel has the data, so
it survives the death of this process; with `power_safe` it is on the disk, at the cost of a flush for each transaction.
Every row carries a checksum, because SQLite detects damaged pages but not damaged contents.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from atoll.errors import StateError
from atoll.manager import journal_tables
from atoll.manager.journal_tables import Search
from atoll.manager.record import Event, Operation, Record
from atoll.manager.rules import Retention
from atoll.model import Cause, State
from atoll.workers import in_portions

T = TypeVar("T")
_BATCH = 256
_PRUNE_EVERY = 512
_PRUNE_OWNER_EVERY = 64
_LOG_BYTES = 16 << 20
_Job = tuple[Callable[[sqlite3.Connection], Any], "asyncio.Future[Any]"]
_Answer = tuple["asyncio.Future[Any]", Any, BaseException | None]


class Journal:
    def __init__(self, path: Path, *, power_safe: bool = False, retention: Retention | None = None) -> None:
        self.path = path
        self._retention = retention or Retention()
        self.rebuilt: Path | None = None
        """The new path of the old journal, if that was damaged and moved aside."""
        self.is_new = False
        """Whether the journal was empty when it was opened: this is the first start, or the old one was lost or
        damaged."""
        self._power_safe = power_safe
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Future[None]
        self._writes = 0
        self._has_pruned = False

    async def open(self) -> None:
        """Open the database. A damaged one is moved aside and replaced by an empty one. Raises StateError if it cannot
        be used."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._over = self._loop.create_future()
        thread = threading.Thread(target=self._work, args=(ready,), name="atoll-journal", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise StateError(f"the journal cannot be opened: {error}") from error
        self._thread = thread
        await ready

    async def aclose(self) -> None:
        """Finish all requested writes, then close the database. May be repeated."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            await asyncio.shield(self._over)
            thread.join()

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, record: Record, event: Event | None = None) -> asyncio.Future[None]:
        """Write a record, and an event if one is given.

        Writes happen in call order. Await the future to know that the row is committed; it raises StateError otherwise.
        Neither ignoring the future nor being cancelled undoes the write.
        """
        body = (record if record.ended_at is None else record.remembered()).model_dump_json()
        crc = journal_tables.checksum(record.id, body)
        row = (record.id, record.ended_at, body, crc, record.owner, record.name, record.created_at)
        self._writes += 1
        prune = self._writes % _PRUNE_EVERY == 0
        keep, owner, now = self._retention, record.owner, event.at if event is not None else record.ended_at

        def work(database: sqlite3.Connection) -> None:
            database.execute(journal_tables.UPSERT, row)
            number = journal_tables.add(database, event, owner)
            if record.ended_at is not None or number % _PRUNE_OWNER_EVERY == _PRUNE_OWNER_EVERY - 1:
                journal_tables.prune_owner(database, owner, keep)
            if prune and now is not None:
                journal_tables.prune(database, keep, now)
                self._has_pruned = True

        return self._ask(work)

    def forget(self, record: Record, event: Event | None = None) -> asyncio.Future[None]:
        """Delete the record, as if it had never existed. Its events stay."""

        def work(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM sandboxes WHERE id = ?", (record.id,))
            if journal_tables.add(database, event, record.owner) % _PRUNE_OWNER_EVERY == _PRUNE_OWNER_EVERY - 1:
                journal_tables.prune_owner(database, record.owner, self._retention)

        return self._ask(work)

    def add(self, events: Iterable[Event], owner: str | None) -> asyncio.Future[None]:
        """Add reports, which are events that change no record."""
        new = list(events)

        def work(database: sqlite3.Connection) -> None:
            for event in new:
                journal_tables.add(database, event, owner)
            journal_tables.prune_reports(database, owner, self._retention)

        return self._ask(work)

    # --- reading --------------------------------------------------------------------------------------------------

    async def living(self) -> tuple[list[Record], list[str]]:
        """Return the records of all sandboxes that have not ended, and the ids of damaged rows."""
        return await self._ask(journal_tables.living)

    async def ended(self, wanted: Search) -> list[Record]:
        """Return the matching records of sandboxes that have ended, newest first."""
        rows = await self._ask(lambda database: journal_tables.search(database, wanted))
        # Parse outside the journal's thread, because all other requests wait for that thread.
        found = await in_portions(lambda row: journal_tables.parse([row])[0], rows)
        return [record for records in found for record in records]

    async def find(self, sandbox_id: str) -> Record | None:
        query = "SELECT id, body, crc FROM sandboxes WHERE id = ?"
        found = await self._ask(lambda database: journal_tables.parse(database.execute(query, (sandbox_id,)))[0])
        return found[0] if found else None

    async def events(
        self,
        *,
        after: int,
        sandbox_id: str | None = None,
        owner: str | None = None,
        limit: int,
        kind: str | None = None,
    ) -> list[Event]:
        rows = await self._ask(lambda database: journal_tables.events(database, after, sandbox_id, owner, limit, kind))
        return [
            Event(
                *(
                    at,
                    id,
                    State(old),
                    State(new),
                    Operation(act) if act else None,
                    Cause(cause) if cause else None,
                    why,
                ),
                *(number, kind or "state", data or ""),
            )
            for at, id, old, new, act, cause, why, number, kind, data in rows
        ]

    async def latest(self) -> int:
        """Return the number of the last event, or 0 if there is none."""
        query = "SELECT COALESCE(MAX(number), 0) FROM events"
        return await self._ask(lambda database: int(database.execute(query).fetchone()[0]))

    # --- the thread -----------------------------------------------------------------------------------------------

    def _ask(self, work: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        assert self._loop is not None
        answer: asyncio.Future[T] = self._loop.create_future()
        # Retrieve the exception here, because no caller may be left to do so when the work fails.
        answer.add_done_callback(lambda future: future.cancelled() or future.exception())
        if self._thread is None:
            answer.set_exception(StateError("the journal is closed"))
        else:
            self._jobs.put((work, answer))
        return answer

    def _work(self, ready: asyncio.Future[None]) -> None:
        assert self._loop is not None
        try:
            database = self._open()
        except BaseException as error:
            self._loop.call_soon_threadsafe(_settle, [(ready, None, error), (self._over, None, None)])
            return
        self._loop.call_soon_threadsafe(_settle, [(ready, None, None)])
        open_for_work = True
        while open_for_work:
            batch = [self._jobs.get()]
            with suppress(queue.Empty):
                while len(batch) < _BATCH and batch[-1] is not None:
                    batch.append(self._jobs.get_nowait())
            open_for_work = batch[-1] is not None
            answers = _transact(database, [job for job in batch if job is not None])
            with suppress(RuntimeError):  # the event loop is closed, so no caller waits
                self._loop.call_soon_threadsafe(_settle, answers)
            if self._has_pruned:
                self._has_pruned = False
                with suppress(sqlite3.Error):  # the file merely stays larger than necessary
                    journal_tables.shrink(database)
        database.close()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_settle, [(self._over, None, None)])

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.OperationalError as error:
            raise StateError(f"the journal '{self.path}' cannot be used: {error}") from error
        except sqlite3.DatabaseError:
            self.rebuilt = journal_tables.put_aside(self.path)
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, isolation_level=None, timeout=2.0)
        database.text_factory = lambda raw: raw.decode(errors="replace")  # the checksum detects damage
        try:
            self.path.chmod(0o600)  # it contains environment variables of sandboxes
            database.execute("PRAGMA auto_vacuum = INCREMENTAL")  # for a new database: before the first write
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            database.execute(f"PRAGMA synchronous = {'FULL' if self._power_safe else 'NORMAL'}")
            if database.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("damaged")
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version > journal_tables.VERSION:
                raise StateError(f"the journal '{self.path}' was written by a newer version of Atoll")
            self.is_new = version == 0
            journal_tables.prepare(database, version)
        except BaseException:
            database.close()
            raise
        return database


def _transact(database: sqlite3.Connection, jobs: list[_Job]) -> list[_Answer]:
    """Run all jobs in one transaction. A failing job fails alone, unless the database itself fails."""
    try:
        database.execute("BEGIN IMMEDIATE")
        answers: list[_Answer] = [(answer, work(database), None) for work, answer in jobs]
        database.execute("COMMIT")
    except Exception as error:
        with suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        if len(jobs) > 1 and not isinstance(error, sqlite3.OperationalError):
            return [answer for job in jobs for answer in _transact(database, [job])]
        refusal = StateError(f"the journal cannot be written: {error}")
        refusal.__cause__ = error
        return [(answer, None, refusal) for _, answer in jobs]
    return answers


def _settle(answers: Iterable[_Answer]) -> None:
    for future, value, error in answers:
        if future.done():
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
