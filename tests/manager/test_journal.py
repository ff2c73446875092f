from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from atoll.manager import StateError
from atoll.manager.journal import Journal
from atoll.manager.record import Event, Record
from atoll.model import SandboxSpec, State


def record(number: int, **values: object) -> Record:
    return Record(id=f"s{number}", engine="process", spec=SandboxSpec(), **values)  # type: ignore[arg-type]


async def test_what_was_asked_for_is_written_in_order_also_for_those_who_left(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    await journal.open()
    waiting = [asyncio.ensure_future(_write(journal, number)) for number in range(100)]
    await asyncio.sleep(0)
    for task in waiting[::2]:
        task.cancel()
    for reason in ("first", "second", "last"):
        journal.write(record(0, reason=reason))
    await asyncio.gather(*waiting, return_exceptions=True)
    await journal.aclose()
    await journal.aclose()
    again = Journal(tmp_path / "j.db")
    await again.open()
    found, damaged = await again.living()
    assert damaged == []
    assert {item.id for item in found} == {f"s{number}" for number in range(100)}
    assert next(item.reason for item in found if item.id == "s0") == "last"
    await again.aclose()


async def _write(journal: Journal, number: int) -> None:
    await journal.write(record(number), Event(0.0, f"s{number}", State.MISSING, State.STARTING))


async def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    await journal.open()
    await journal.write(record(1))
    assert (tmp_path / "j.db").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    await journal.aclose()


async def test_a_closed_journal_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    await journal.open()
    await journal.aclose()
    with pytest.raises(StateError, match="closed"):
        await journal.write(record(1))


@pytest.mark.parametrize("power_safe", [False, True])
async def test_a_copy_taken_at_any_moment_opens_and_has_all_that_was_acknowledged(
    tmp_path: Path, power_safe: bool
) -> None:
    """As after a power loss: the files as they are on the disk, the end of the log cut off at any place."""
    journal = Journal(tmp_path / "j.db", power_safe=power_safe)
    await journal.open()
    for number in range(30):
        await journal.write(record(number))
        copy = tmp_path / f"copy-{number}"
        copy.mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(tmp_path / f"j.db{suffix}", copy / f"j.db{suffix}")
        if number % 3 == 2:
            log = copy / "j.db-wal"
            os.truncate(log, log.stat().st_size - number * 7)
        other = Journal(copy / "j.db")
        await other.open()
        assert other.rebuilt is None
        found, damaged = await other.living()
        assert damaged == []
        assert len(found) >= number  # at most the last one is missing, where the log was cut
        await other.aclose()
    await journal.aclose()


async def test_old_events_and_records_are_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.manager.journal._PRUNE_EVERY", 50)
    monkeypatch.setattr("atoll.manager.journal_tables._KEPT_ENDED", 20)
    monkeypatch.setattr("atoll.manager.journal_tables._KEPT_EVENTS", 30)
    journal = Journal(tmp_path / "j.db")
    await journal.open()
    await journal.write(record(1000))
    for number in range(200):
        await journal.write(record(number, ended_at=float(number)), Event(0.0, "x", State.RUNNING, State.MISSING))
    assert len(await journal.ended(1000)) <= 20 + 50
    assert len(await journal.events(after=0, sandbox_id=None, limit=1000)) <= 30 + 50
    assert [item.id for item in (await journal.living())[0]] == ["s1000"]
    await journal.aclose()


async def test_a_database_that_another_program_keeps_locked_is_refused(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "j.db", isolation_level=None)
    other.execute("CREATE TABLE t (x)")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StateError, match="locked"):
        await Journal(tmp_path / "j.db").open()
    other.close()
