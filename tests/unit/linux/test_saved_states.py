"""What is written down about saved states, after the death of whoever wrote it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.linux.linux_record import Base
from atoll.engines.linux.states.saved_state import SavedState, SavedStates


@pytest.fixture
def states(tmp_path: Path) -> SavedStates:
    return SavedStates(tmp_path / "saved")


def _origin(states: SavedStates) -> str:
    """As a fork makes it: held by its process until the new sandboxes hold it."""
    saved_id = states.new_id()
    states.hold(saved_id)
    states.write(SavedState(id=saved_id, kind="origin", created_at=1.0, base=Base(image="host")))
    return saved_id


def _unused(states: SavedStates) -> list[str]:
    return list(states.unused(lambda sandbox_id: sandbox_id == "alive"))


def _held_by(states: SavedStates, process: str) -> str:
    saved_id = _origin(states)
    [holder] = (states.directory / f"{saved_id}.users").iterdir()
    holder.rename(holder.with_name(f".{process}"))
    return saved_id


def test_what_a_living_process_or_sandbox_holds_stays(states: SavedStates) -> None:
    saved_id = _origin(states)
    assert _unused(states) == []
    assert states.use(saved_id, "alive")
    assert not states.release(saved_id)
    assert _unused(states) == []
    assert states.leave(saved_id, "alive")
    assert os.listdir(states.directory) == []


def test_the_number_of_the_dead_may_be_that_of_a_living_process(states: SavedStates) -> None:
    me = ProcessRef.of(os.getpid())
    assert me is not None
    saved_id = _held_by(states, f"{me.pid}-{me.started - 1}")
    draft = states.directory / f".{'ab' * 12}.{me.pid}-{me.started - 1}"
    draft.touch()
    assert not states.is_known("ab" * 12)
    assert _unused(states) == [saved_id]
    states.sweep()
    assert os.listdir(states.directory) == []


def test_the_dead_hold_nothing_before_they_are_reaped(states: SavedStates) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        ref = ProcessRef.of(process.pid)
        assert ref is not None
        saved_id = _held_by(states, f"{ref.pid}-{ref.started}")
        assert _unused(states) == []
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert _unused(states) == [saved_id]


def test_one_that_was_half_forgotten_is_forgotten(states: SavedStates) -> None:
    saved_id = _origin(states)
    for user in (states.directory / f"{saved_id}.users").iterdir():
        user.unlink()
    (states.directory / f"{saved_id}.users").rmdir()
    assert _unused(states) == [saved_id]
    assert os.listdir(states.directory) == []
