"""The tables of the journal."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atoll.manager.record import Event, Record
from atoll.manager.rules import Retention

VERSION = 3
Row = tuple[str, str, int]
"""The id of a record, its stored body, and the checksum of both."""
_MAX_REASON = 2_000
_PAGE_BYTES = 1 << 20
"""Maximum size of the report data in one page of events."""
_FREED_PAGES = 256
"""How many pages are returned to the file system at a time."""
_TABLES = """
CREATE TABLE IF NOT EXISTS sandboxes (id TEXT PRIMARY KEY, ended_at REAL, body TEXT NOT NULL, crc INTEGER NOT NULL,
    owner TEXT, name TEXT, created_at REAL);
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, sandbox_id TEXT, before TEXT,
    after TEXT, act TEXT, cause TEXT, reason TEXT, owner TEXT, kind TEXT, data TEXT);
"""
_FROM_FIRST = """
ALTER TABLE sandboxes ADD COLUMN owner TEXT;
ALTER TABLE sandboxes ADD COLUMN name TEXT;
ALTER TABLE sandboxes ADD COLUMN created_at REAL;
ALTER TABLE events ADD COLUMN owner TEXT;
UPDATE sandboxes SET owner = json_extract(body, '$.owner'), name = json_extract(body, '$.name'),
    created_at = json_extract(body, '$.created_at') WHERE json_valid(body);
UPDATE events SET owner = (SELECT owner FROM sandboxes WHERE id = events.sandbox_id);
"""
"""Migration from version 1, which had no columns to search by."""
_FROM_SECOND = "ALTER TABLE events ADD COLUMN kind TEXT; ALTER TABLE events ADD COLUMN data TEXT;"
"""Migration from version 2, which had only one kind of event. That kind is stored as NULL."""
_INDEXES = """
CREATE INDEX IF NOT EXISTS ended ON sandboxes (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS ended_created ON sandboxes (created_at) WHERE ended_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS ended_of ON sandboxes (owner, ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS ended_created_of ON sandboxes (owner, created_at) WHERE ended_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS events_of ON events (sandbox_id, number);
CREATE INDEX IF NOT EXISTS events_of_owner ON events (owner, number);
CREATE INDEX IF NOT EXISTS changes_of_owner ON events (owner, number) WHERE kind IS NULL;
CREATE INDEX IF NOT EXISTS reports_of_owner ON events (owner, number) WHERE kind IS NOT NULL;
CREATE INDEX IF NOT EXISTS events_at ON events (at);
"""
UPSERT = "INSERT OR REPLACE INTO sandboxes VALUES (?,?,?,?,?,?,?)"


def prepare(database: sqlite3.Connection, version: int) -> None:
    """Create the tables, or migrate those of an earlier version."""
    change = (_FROM_FIRST if version == 1 else "") + (_FROM_SECOND if version in (1, 2) else "")
    database.executescript(f"BEGIN IMMEDIATE; {_TABLES} {change} {_INDEXES} PRAGMA user_version = {VERSION}; COMMIT;")
    if version == 1:  # an existing file returns freed pages only after a VACUUM
        with suppress(sqlite3.OperationalError):
            database.execute("VACUUM")


def add(database: sqlite3.Connection, event: Event | None, owner: str | None) -> int:
    """Insert the event and return its number, or 0 if there is no event."""
    if event is None:
        return 0
    reason = event.reason[:_MAX_REASON]
    kind = None if event.kind == "state" else event.kind
    change = (event.at, event.sandbox_id, event.before, event.after, event.act, event.cause, reason, owner)
    row = (*change, kind, event.data or None)
    return database.execute("INSERT INTO events VALUES (NULL,?,?,?,?,?,?,?,?,?,?)", row).lastrowid or 0


def prune_owner(database: sqlite3.Connection, owner: str | None, keep: Retention) -> None:
    """Delete this owner's oldest rows beyond the limits. Rows of other owners are not touched."""
    database.execute(
        "DELETE FROM sandboxes WHERE owner IS :owner AND ended_at IS NOT NULL AND ended_at <= (SELECT ended_at FROM "
        "sandboxes WHERE owner IS :owner AND ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT 1 OFFSET :keep)",
        {"owner": owner, "keep": keep.ended_per_owner},
    )
    database.execute(
        "DELETE FROM events WHERE owner IS :owner AND kind IS NULL AND number <= "
        "(SELECT number FROM events WHERE owner IS :owner AND kind IS NULL ORDER BY number DESC LIMIT 1 OFFSET :keep)",
        {"owner": owner, "keep": keep.events_per_owner},
    )


def prune_reports(database: sqlite3.Connection, owner: str | None, keep: Retention) -> None:
    """Delete this owner's oldest reports beyond the limit. Sandboxes write reports, so reports displace only older
    reports."""
    database.execute(
        "DELETE FROM events WHERE owner IS :owner AND kind IS NOT NULL AND number <= "
        "(SELECT number FROM events WHERE owner IS :owner AND kind IS NOT NULL "
        "ORDER BY number DESC LIMIT 1 OFFSET :keep)",
        {"owner": owner, "keep": keep.reports_per_owner},
    )


def prune(database: sqlite3.Connection, keep: Retention, now: float) -> None:
    """Delete what is too old, and the oldest rows beyond the limits for all owners together."""
    database.execute(
        "DELETE FROM events WHERE number <= (SELECT number FROM events ORDER BY number DESC LIMIT 1 OFFSET ?)",
        (keep.events,),  # counts rows, because the numbers of deleted reports leave gaps
    )
    database.execute(
        "DELETE FROM sandboxes WHERE ended_at <= "
        "(SELECT ended_at FROM sandboxes WHERE ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT 1 OFFSET ?)",
        (keep.ended,),
    )
    database.execute("DELETE FROM sandboxes WHERE ended_at IS NOT NULL AND ended_at < ?", (now - keep.age_s,))
    database.execute("DELETE FROM events WHERE at < ?", (now - keep.age_s,))


def shrink(database: sqlite3.Connection) -> None:
    """Return some of the freed pages to the file system. Must not be called within a transaction."""
    with suppress(sqlite3.Error):  # the next call tries again
        database.executescript(f"PRAGMA incremental_vacuum({_FREED_PAGES});")


@dataclass(frozen=True, slots=True)
class Search:
    """Which ended sandboxes are wanted. A field that is None or empty matches everything."""

    owner: str | None = None
    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    after: tuple[float, str] | None = None
    """The creation time and the id of the last sandbox on the previous page."""
    limit: int = 100


def search(database: sqlite3.Connection, wanted: Search) -> list[Row]:
    """Return the matching rows, newest first."""
    clauses, values = ["ended_at IS NOT NULL"], list[object]()
    for column in ("owner", "name"):
        if (value := getattr(wanted, column)) is not None:
            clauses.append(f"{column} = ?")
            values.append(value)
    if wanted.after is not None:
        clauses.append("(created_at < ? OR (created_at = ? AND id > ?))")
        values += [wanted.after[0], *wanted.after]
    for label in wanted.labels.items():
        plain = "CASE WHEN json_valid(body) THEN body ELSE '{}' END"
        # A damaged row does not match, and must not raise an error.
        clauses.append(f"EXISTS (SELECT 1 FROM json_each({plain}, '$.labels') WHERE key = ? AND value = ?)")  # noqa: S608
        values += label
    where = " AND ".join(clauses)  # contains only fixed texts of this function; values are bound
    query = f"SELECT id, body, crc FROM sandboxes WHERE {where} ORDER BY created_at DESC, id LIMIT ?"  # noqa: S608
    return database.execute(query, (*values, wanted.limit)).fetchall()


def events(
    database: sqlite3.Connection,
    after: int,
    sandbox_id: str | None,
    owner: str | None,
    limit: int,
    kind: str | None = None,
) -> list[tuple[Any, ...]]:
    clauses, values = ["number > ?"], [after, *(each for each in (sandbox_id, owner) if each is not None)]
    clauses += ["sandbox_id = ?"] if sandbox_id is not None else []
    clauses += ["owner = ?"] if owner is not None else []
    if kind == "state":
        clauses.append("kind IS NULL")
    elif kind is not None:
        clauses.append("kind = ?")
        values.append(kind)
    columns = "at, sandbox_id, before, after, act, cause, reason, number, kind, data"
    where = " AND ".join(clauses)
    query = f"SELECT {columns} FROM events WHERE {where} ORDER BY number LIMIT ?"  # noqa: S608
    found: list[tuple[Any, ...]] = []
    size = 0
    for row in database.execute(query, (*values, limit)):
        size += len(row[-1] or "")
        if found and size > _PAGE_BYTES:
            break  # the next page continues here
        found.append(row)
    return found


def living(database: sqlite3.Connection) -> tuple[list[Record], list[str]]:
    return parse(database.execute("SELECT id, body, crc FROM sandboxes WHERE ended_at IS NULL"))


def parse(rows: Iterable[Row]) -> tuple[list[Record], list[str]]:
    found: list[Record] = []
    damaged: list[str] = []
    for id, body, crc in rows:
        try:
            if checksum(id, body) != crc:
                raise ValueError
            found.append(Record.model_validate_json(body))
        except (ValidationError, ValueError, TypeError, AttributeError):
            damaged.append(str(id))
    return found, damaged


def checksum(id: str, body: str) -> int:
    return zlib.crc32(f"{id}\0{body}".encode(errors="replace"))


def put_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    for suffix in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    path.rename(aside)
    return aside
