"""The tables of the journal."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from atoll.manager.record import Event, Record

VERSION = 1
_KEPT_EVENTS = 50_000
_KEPT_ENDED = 5_000
SCHEMA = """
CREATE TABLE IF NOT EXISTS sandboxes (id TEXT PRIMARY KEY, ended_at REAL, body TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS ended ON sandboxes (ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, sandbox_id TEXT, before TEXT,
    after TEXT, act TEXT, cause TEXT, reason TEXT);
CREATE INDEX IF NOT EXISTS events_of ON events (sandbox_id, number);
"""
UPSERT = "INSERT OR REPLACE INTO sandboxes VALUES (?,?,?,?)"


def add(database: sqlite3.Connection, event: Event | None) -> None:
    if event is not None:
        row = (event.at, event.sandbox_id, event.before, event.after, event.act, event.cause, event.reason)
        database.execute("INSERT INTO events VALUES (NULL,?,?,?,?,?,?,?)", row)


def prune(database: sqlite3.Connection) -> None:
    database.execute("DELETE FROM events WHERE number <= (SELECT MAX(number) FROM events) - ?", (_KEPT_EVENTS,))
    database.execute(
        "DELETE FROM sandboxes WHERE ended_at < "
        "(SELECT ended_at FROM sandboxes WHERE ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT 1 OFFSET ?)",
        (_KEPT_ENDED,),
    )


def living(database: sqlite3.Connection) -> tuple[list[Record], list[str]]:
    return parse(database.execute("SELECT id, body, crc FROM sandboxes WHERE ended_at IS NULL"))


def parse(rows: Iterable[tuple[str, str, int]]) -> tuple[list[Record], list[str]]:
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
