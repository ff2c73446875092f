from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from atoll.manager import StateError, journal_tables
from atoll.manager.journal import Journal
from atoll.manager.journal_tables import Search, checksum
from atoll.manager.record import Event, Record
from atoll.manager.rules import Retention
from atoll.model import SandboxSpec, State


def record(number: int, **values: object) -> Record:
    return Record(id=f"s{number}", engine="bubblewrap", spec=SandboxSpec(), **values)  # type: ignore[arg-type]


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


async def test_an_event_that_cannot_be_written_fails_alone(tmp_path: Path) -> None:
    """A reason may hold what a hostile sandbox wrote; SQLite refuses lone surrogates with an error of Python's own."""
    journal = Journal(tmp_path / "j.db")
    await journal.open()
    bad = Event(0.0, "s1", State.MISSING, State.STARTING, reason="\ud800")
    answers = await asyncio.gather(
        _write(journal, 0), journal.write(record(1), bad), _write(journal, 2), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [type(None), StateError, type(None)]
    await _write(journal, 3)
    found, damaged = await journal.living()
    assert damaged == []
    assert {item.id for item in found} == {"s0", "s2", "s3"}
    await journal.aclose()


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
    journal = Journal(tmp_path / "j.db", retention=Retention(ended=20, events=30))
    await journal.open()
    await journal.write(record(1000))
    for number in range(200):
        await journal.write(record(number, ended_at=float(number)), Event(0.0, "x", State.RUNNING, State.MISSING))
    assert len(await journal.ended(Search(limit=1000))) <= 20 + 50
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


def ended(number: int, owner: str, **values: object) -> Record:
    return record(number, owner=owner, created_at=float(number), ended_at=number + 0.5, **values)


async def test_one_owner_never_costs_another_its_past(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db", retention=Retention(ended_per_owner=20, events_per_owner=30))
    await journal.open()
    for number in range(5):
        await journal.write(ended(number, "ann"), Event(0.0, f"s{number}", State.RUNNING, State.MISSING))
    writes = []
    for number in range(100, 500):
        event = Event(0.0, f"s{number}", State.RUNNING, State.MISSING)
        is_over = number % 2 == 0
        writes.append(
            journal.write(ended(number, "eve"), event)
            if is_over
            else journal.forget(record(number, owner="eve"), event)
        )
    await asyncio.gather(*writes)
    assert len(await journal.ended(Search("eve", limit=1000))) == 20
    assert len(await journal.ended(Search("ann", limit=1000))) == 5
    assert len(await journal.events(after=0, owner="eve", limit=1000)) <= 30 + 64
    assert len(await journal.events(after=0, owner="ann", limit=1000)) == 5
    await journal.aclose()


async def test_what_is_old_is_forgotten_and_the_file_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.manager.journal._PRUNE_EVERY", 10)
    journal = Journal(tmp_path / "j.db", retention=Retention(age_s=100))
    await journal.open()
    for number in range(300):
        journal.write(ended(number % 50, "ann", reason="x" * 1500, name=f"n{number}"))
        journal.write(ended(number + 1000, "ann", reason="x" * 1500).model_copy(update={"ended_at": 10.0}))
    await journal.latest()
    large = (tmp_path / "j.db").stat().st_size + (tmp_path / "j.db-wal").stat().st_size
    for _ in range(40):
        await journal.write(record(5000, owner="ann"), Event(1000.0, "s5000", State.RUNNING, State.PAUSED))
    assert await journal.ended(Search(limit=1000)) == []
    await journal.aclose()
    assert (tmp_path / "j.db").stat().st_size < large / 4


async def test_ended_ones_come_in_pages_of_what_was_asked_for(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    await journal.open()
    for number in range(60):
        labels = {"even": "yes", 'a"b': "1"} if number % 2 == 0 else {}
        name = "named" if number % 10 == 0 else None
        journal.write(ended(number, "ann" if number < 50 else "bob", labels=labels, name=name))
    journal.write(record(7, owner="ann"))  # it lives
    found: list[str] = []
    after = None
    while page := await journal.ended(Search("ann", labels={'a"b': "1", "even": "yes"}, after=after, limit=7)):
        assert len(page) <= 7
        found += [each.id for each in page]
        after = (page[-1].created_at, page[-1].id)
    assert found == [f"s{number}" for number in range(48, -1, -2)]
    assert [each.id for each in await journal.ended(Search("ann", "named"))] == ["s40", "s30", "s20", "s10", "s0"]
    assert len(await journal.ended(Search(limit=1000))) == 59
    await journal.aclose()


async def test_what_is_kept_of_an_ended_one_is_small(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    await journal.open()
    spec = SandboxSpec(env={"A": "x" * 100_000}, image="i")
    await journal.write(record(1, reason="y" * 100_000).model_copy(update={"spec": spec, "ended_at": 1.0}))
    found = await journal.find("s1")
    assert found is not None
    assert (found.spec.image, found.ended_at) == ("i", 1.0)
    assert len(found.model_dump_json()) < 4_000
    await journal.aclose()


async def test_a_journal_of_the_first_version_goes_on(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / "j.db")
    old.executescript(
        "CREATE TABLE sandboxes (id TEXT PRIMARY KEY, ended_at REAL, body TEXT NOT NULL, crc INTEGER NOT NULL);"
        "CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, sandbox_id TEXT, before TEXT,"
        "    after TEXT, act TEXT, cause TEXT, reason TEXT); PRAGMA user_version = 1;"
    )
    for each in (record(1, owner="ann"), ended(2, "bob")):
        body = each.model_dump_json()
        old.execute("INSERT INTO sandboxes VALUES (?,?,?,?)", (each.id, each.ended_at, body, checksum(each.id, body)))
        old.execute("INSERT INTO events VALUES (NULL,1.0,?,'RUNNING','PAUSED',NULL,NULL,'')", (each.id,))
    old.execute("INSERT INTO sandboxes VALUES ('s3', 1.0, 'damaged', 0)")
    old.commit()
    old.close()
    journal = Journal(tmp_path / "j.db")
    await journal.open()
    assert [each.id for each in (await journal.living())[0]] == ["s1"]
    assert [each.id for each in await journal.ended(Search("bob"))] == ["s2"]
    assert [each.sandbox_id for each in await journal.events(after=0, owner="ann", limit=10)] == ["s1"]
    await journal.aclose()


async def test_a_long_page_leaves_the_loop_to_others_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j.db")
    await journal.open()
    for number in range(100):
        journal.write(ended(number, "eve"))
    turns, parsed_at = 0, list[int]()
    parse = journal_tables.parse

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def parse_and_note(rows: list[journal_tables.Row]) -> tuple[list[Record], list[str]]:
        parsed_at.append(turns)
        return parse(rows)

    monkeypatch.setattr(journal_tables, "parse", parse_and_note)
    beside = asyncio.ensure_future(other())
    assert len(await journal.ended(Search("eve", limit=100))) == 100
    beside.cancel()
    assert len(set(parsed_at)) >= 10, "the others had a turn at least every tenth record"
    await journal.aclose()


async def test_a_journal_of_the_second_version_goes_on(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / "j.db")
    old.executescript(
        "CREATE TABLE sandboxes (id TEXT PRIMARY KEY, ended_at REAL, body TEXT NOT NULL, crc INTEGER NOT NULL,"
        "    owner TEXT, name TEXT, created_at REAL);"
        "CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, sandbox_id TEXT, before TEXT,"
        "    after TEXT, act TEXT, cause TEXT, reason TEXT, owner TEXT); PRAGMA user_version = 2;"
        "INSERT INTO events VALUES (NULL,1.0,'s1','RUNNING','PAUSED',NULL,NULL,'then','ann');"
    )
    old.close()
    journal = Journal(tmp_path / "j.db")
    await journal.open()
    report = Event(2.0, "s1", State.PAUSED, State.PAUSED, reason="now", kind="port", data='{"port":1}')
    await journal.add([report], "ann")
    found = await journal.events(after=0, owner="ann", limit=10)
    assert [(event.reason, event.kind, event.data) for event in found] == [
        ("then", "state", ""),
        ("now", "port", '{"port":1}'),
    ]
    await journal.aclose()


async def test_reports_displace_only_older_reports_of_the_same_owner(tmp_path: Path) -> None:
    keep = Retention(events_per_owner=4, reports_per_owner=5, events=50)
    journal = Journal(tmp_path / "j.db", retention=keep)
    await journal.open()
    change = Event(1.0, "s1", State.RUNNING, State.PAUSED)
    await journal.write(record(1, owner="ann"), change)
    await journal.add([Event(1.0, "s2", State.RUNNING, State.RUNNING, kind="callback", data="{}")], "bob")
    for number in range(600):  # enough to look at everything that is too much of all owners together
        report = Event(2.0, "s1", State.PAUSED, State.PAUSED, reason=str(number), kind="callback", data="{}")
        journal.add([report], "ann")
        journal.write(record(1, owner="ann"))
    journal.write(ended(2, "ann"))  # what is too much of one owner is looked at when a sandbox ends
    found = await journal.events(after=0, owner="ann", limit=1000)
    assert [event.kind for event in found] == ["state", *["callback"] * 5]
    assert [event.reason for event in found[1:]] == [str(number) for number in range(595, 600)]
    assert len(await journal.events(after=0, owner="bob", limit=10)) == 1
    await journal.aclose()


async def test_a_page_of_events_has_a_bound_in_bytes(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.db")
    await journal.open()
    large = Event(1.0, "s1", State.RUNNING, State.RUNNING, kind="callback", data="x" * (300 << 10))
    await journal.add([large] * 10, "ann")
    sizes, after = list[int](), 0
    while page := await journal.events(after=after, owner="ann", limit=1000):
        sizes.append(len(page))
        after = page[-1].number
    assert sizes == [3, 3, 3, 1]
    await journal.aclose()
