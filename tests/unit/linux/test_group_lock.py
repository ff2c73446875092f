"""Whoever removes shared control groups, and whoever needs them, in threads as in processes."""

from __future__ import annotations

import threading
from pathlib import Path

from atoll.engines.host.cgroups.group_lock import GroupLock
from atoll.waiting import Deadline


def test_those_who_remove_take_turns(tmp_path: Path) -> None:
    """The one before may have looked while what the next one removes was still there."""
    lock, found, ready = GroupLock(tmp_path / "groups.lock"), list[bool](), threading.Event()

    def remove() -> None:
        ready.set()
        with lock.unclaimed() as nobody:
            found.append(nobody)

    with lock.unclaimed() as nobody:
        assert nobody
        other = threading.Thread(target=remove)
        other.start()
        ready.wait()
        other.join(0.05)
        assert found == []
    other.join()
    assert found == [True]


async def test_what_is_claimed_is_left_alone_at_once(tmp_path: Path) -> None:
    lock = GroupLock(tmp_path / "groups.lock")
    async with lock.claimed(Deadline.after(5)), lock.claimed(Deadline.after(5)):
        with lock.unclaimed() as nobody:
            assert not nobody
    with lock.unclaimed() as nobody:
        assert nobody
