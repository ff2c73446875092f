from __future__ import annotations

import itertools
import multiprocessing
from pathlib import Path

import pytest

from atoll.claims import Claims
from atoll.engines.linux.plan import id_ranges
from atoll.engines.linux.plan.id_ranges import COUNT, FIRST, IdRanges
from atoll.engines.linux.plan.sandbox_plan import RANGE
from atoll.errors import EngineError


def claim_some(directory: Path, owner: str) -> list[int]:
    ranges = IdRanges(directory)
    return [ranges.claim(f"{owner}-{number}").first for number in range(25)]


def test_ranges_do_not_overlap_and_are_nobody_elses(tmp_path: Path) -> None:
    ranges = IdRanges(tmp_path)
    firsts = sorted(ranges.claim(f"s{number}").first for number in range(50))
    assert all(after - before >= RANGE for before, after in itertools.pairwise(firsts))
    assert firsts[0] >= FIRST
    assert firsts[-1] + RANGE <= FIRST + COUNT * RANGE <= 0x8000_0000


def test_many_processes_never_get_the_same(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        found = pool.starmap(claim_some, [(tmp_path, f"p{number}") for number in range(4)])
    every = [first for part in found for first in part]
    assert len(set(every)) == len(every) == 100
    assert len(IdRanges(tmp_path).owners()) == 100


def test_only_the_owner_gives_a_range_back(tmp_path: Path) -> None:
    ranges = IdRanges(tmp_path)
    claimed = ranges.claim("mine")
    ranges.release(claimed.first, "other")
    assert ranges.owners() == {claimed.first: "mine"}
    ranges.release_all("mine")
    ranges.release(claimed.first, "mine")
    assert ranges.owners() == {}


def test_when_all_are_taken_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_ranges, "COUNT", 2)
    ranges = IdRanges(tmp_path)
    ranges.claim("a"), ranges.claim("b")
    with pytest.raises(EngineError, match="in use"):
        ranges.claim("c")
    assert sorted(ranges.owners().values()) == ["a", "b"]


class ReleasedMeanwhile(Claims):
    """Another process releases a range in the moment in which this one makes up for its claim on the machine."""

    def take(self, name: str, owner: str) -> bool:
        if owner == "gone":
            other = IdRanges(self.home / "ids", Claims(self.kind, self.home, self.machine))
            other.release(int(name), owner)
        return super().take(name, owner)


def test_what_is_released_while_a_process_begins_is_claimed_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Claims("ids", tmp_path, tmp_path / "machine")
    gone = IdRanges(tmp_path / "ids", machine).claim("gone").first
    beginning = IdRanges(tmp_path / "ids", ReleasedMeanwhile("ids", tmp_path, tmp_path / "machine"))
    claimed = beginning.claim("mine").first
    assert machine.own() == {str(claimed): "mine"}
    # The link is gone before it is read; and what an earlier version claimed for nobody is released.
    machine.take(str(gone), "")
    later = IdRanges(tmp_path / "ids", machine)
    monkeypatch.setattr(IdRanges, "_claimed", lambda _: [claimed, gone + RANGE])
    also = later.claim("also").first
    assert machine.own() == {str(claimed): "mine", str(also): "also"}
    assert later.owners() == {claimed: "mine", also: "also"}
