"""Two installations on one machine: whatever their data directories, they never hand out the same ids, links or
groups."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll import claims
from atoll.claims import Claims, uids_in_use
from atoll.engines.bubblewrap.users import Users
from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.plan import id_ranges
from atoll.engines.linux.plan.id_ranges import FIRST, IdRanges
from atoll.engines.linux.plan.sandbox_plan import RANGE
from atoll.errors import EngineUnavailableError
from atoll.network import client as network
from atoll.network.client import Gateway
from atoll.network.link import netlink
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from needs import missing


@pytest.fixture
def pair(folder: Path) -> Iterator[tuple[Settings, Settings]]:
    """Two installations."""
    path = Path(tempfile.mkdtemp(dir=folder))
    path.chmod(0o755)
    yield Settings(path / "a", path / "ra"), Settings(path / "b", path / "rb")
    shutil.rmtree(path)


async def ids_of(engine: NativeEngine, sandbox: AsyncSandbox) -> int:
    return int(Path(f"/proc/{engine.first_pid(sandbox.id)}/uid_map").read_text().split()[1])


async def test_sandboxes_of_two_installations_share_no_ids(
    pair: tuple[Settings, Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(id_ranges, "_start", lambda owner: 7)  # all of them look at the same place first
    engines = [NativeEngine(settings) for settings in pair]
    boxes = [(engine, AsyncSandbox(engine=engine, settings=of)) for engine, of in zip(engines, pair, strict=True)] + [
        (engine, AsyncSandbox(engine=engine, settings=of)) for engine, of in zip(engines, pair, strict=True)
    ]
    try:
        await asyncio.gather(*(box.create() for _, box in boxes))
        firsts = [await ids_of(engine, box) for engine, box in boxes]
        assert len(set(firsts)) == 4
        assert not set(engines[0].layout.ids.owners()) & set(engines[1].layout.ids.owners())
        claimed = Claims("ids", pair[0].data_dir)
        assert all(claimed.find(str(first)) is not None for first in firsts)
    finally:
        for _, box in boxes:
            await box.cleanup()
        for engine in engines:
            await engine.gc()
            await engine.aclose()
    assert not any(claimed.find(str(first)) for first in firsts)


def test_many_installations_at_once_never_get_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although their sandboxes have the same names."""
    monkeypatch.setattr(id_ranges, "_start", lambda owner: 5)
    together = threading.Barrier(4)

    def claim_some(number: int) -> list[int]:
        ranges = ranges_of(tmp_path, f"home-{number}")
        together.wait()
        return [ranges.claim(f"same-{number}").first for number in range(40)]

    with ThreadPoolExecutor(4) as pool:
        every = [first for part in pool.map(claim_some, range(4)) for first in part]
    assert len(set(every)) == len(every) == 160


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims made just now count as old."""
    monkeypatch.setattr(claims, "_YOUNG_S", -1.0)


def ranges_of(tmp_path: Path, name: str) -> IdRanges:
    (tmp_path / name).mkdir(exist_ok=True)
    return IdRanges(tmp_path / name / "ids", Claims("ids", tmp_path / name, tmp_path / "machine"))


def test_claims_of_an_installation_that_is_gone_are_collected(tmp_path: Path, old: None) -> None:
    gone, here = ranges_of(tmp_path, "gone"), ranges_of(tmp_path, "here")
    lost, kept = gone.claim("of-this-test-alone").first, here.claim("b").first
    assert here.collect() == []
    shutil.rmtree(tmp_path / "gone")
    assert here.collect() == [str(lost)]
    assert here.owners() == {kept: "b"}


def test_a_young_claim_one_in_use_and_one_from_elsewhere_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, here = ranges_of(tmp_path, "gone"), ranges_of(tmp_path, "here")
    first = gone.claim("of-this-test-alone").first
    shutil.rmtree(tmp_path / "gone")
    assert here.collect() == [], "its sandbox may just be being made"
    monkeypatch.setattr(claims, "_YOUNG_S", -1.0)
    with monkeypatch.context() as patch:
        patch.setattr(id_ranges, "uids_in_use", lambda: {first + RANGE - 1})
        assert here.collect() == [], "its sandbox runs"
    with monkeypatch.context() as patch:
        patch.setattr(claims, "_pid_namespace", lambda: "[elsewhere]")
        assert here.collect() == [], "we would not see whether its sandbox runs"
    assert here.collect() == [str(first)]


def test_a_directory_that_is_made_again_does_not_inherit_the_claims_of_the_one_before(tmp_path: Path) -> None:
    """Many file systems give it the same inode. The sandboxes of the one before may still run."""
    before = ranges_of(tmp_path, "a")
    first = before.claim("running").first
    shutil.rmtree(tmp_path / "a")
    again = ranges_of(tmp_path, "a")
    assert again.owners() == {}
    again.release_all("running")
    assert again.machine is not None
    assert again.machine.find(str(first)) is not None


def test_a_claim_that_was_released_meanwhile_and_is_anothers_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ours, theirs = (Claims("ids", tmp_path / name, tmp_path / "machine") for name in "ab")
    assert ours.take("1", "sandbox")
    find = Claims.find

    def find_and_be_late(self: Claims, name: str) -> claims.Claim | None:
        found = find(self, name)
        if found is not None and found.home == str(tmp_path / "a"):
            monkeypatch.setattr(Claims, "find", find)
            Claims("ids", tmp_path / "a", tmp_path / "machine").release("1", "sandbox")
            assert theirs.take("1", "other")
        return found

    monkeypatch.setattr(Claims, "find", find_and_be_late)
    ours.release("1", "sandbox")
    assert theirs.own() == {"1": "other"}


def test_processes_of_a_sandbox_are_seen_by_their_ids() -> None:
    child = os.fork()
    if child == 0:
        os.setresuid(FIRST, FIRST, FIRST)
        time.sleep(60)
    try:
        deadline = time.monotonic() + 10
        while FIRST not in uids_in_use():
            assert time.monotonic() < deadline
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_when_all_seem_taken_those_of_the_dead_are_used(
    tmp_path: Path, old: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(id_ranges, "COUNT", 2)
    gone, here = ranges_of(tmp_path, "gone"), ranges_of(tmp_path, "here")
    first = here.claim("a").first
    gone.claim("b")
    shutil.rmtree(tmp_path / "gone")
    assert here.claim("c").first != first


def test_a_claim_of_an_earlier_version_is_kept_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_ranges, "_start", lambda owner: 3)
    (tmp_path / "a").mkdir()
    before = IdRanges(tmp_path / "a" / "ids").claim("running").first
    upgraded = ranges_of(tmp_path, "a")
    assert upgraded.claim("new").first != before
    assert ranges_of(tmp_path, "b").claim("other").first != before
    upgraded.release_all("running")
    assert ranges_of(tmp_path, "b").claim("another").first == before


def test_half_of_a_claim_is_found_and_given_back(tmp_path: Path) -> None:
    ranges = ranges_of(tmp_path, "a")
    assert ranges.machine is not None
    ranges.machine.take(str(FIRST), "killed")
    assert ranges.owners() == {FIRST: "killed"}
    ranges.release_all("killed")
    assert ranges.owners() == {}


def test_a_copy_of_a_data_directory_is_refused(pair: tuple[Settings, Settings]) -> None:
    first, second = pair
    mine = NativeEngine(first).layout.slice
    shutil.copytree(first.data_dir, second.data_dir)
    with pytest.raises(EngineUnavailableError, match="is a copy of"):
        _ = NativeEngine(second).layout.slice
    shutil.rmtree(first.data_dir)
    assert NativeEngine(second).layout.slice == mine, "one that was moved is the same installation"


def test_links_of_two_installations_have_different_addresses(pair: tuple[Settings, Settings]) -> None:
    if (reason := network.problem()) is not None:
        missing(reason)
    gateways = [Gateway(settings) for settings in pair]
    networks = [netlink.new_network() for _ in pair]
    try:
        for gateway, fd in zip(gateways, networks, strict=True):
            gateway.attach("same", "all", fd)
        records = [gateway.record("same") for gateway in gateways]
        slots = {record.slot for record in records if record is not None}
        assert len(slots) == 2
        for gateway in gateways:
            assert gateway.files.link_claims().own()
            gateway.detach("same")
            assert gateway.files.link_claims().own() == {}
    finally:
        for gateway, fd in zip(gateways, networks, strict=True):
            os.close(fd)
            gateway.collect()


def test_users_of_engine_process_are_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter((5, 5, 6))
    monkeypatch.setattr("atoll.engines.bubblewrap.users.secrets.randbelow", lambda count: next(numbers))
    made = [Users(tmp_path / name, Claims("users", tmp_path, tmp_path / "machine")) for name in "ab"]
    assert made[0].claim("one") != made[1].claim("two")


def test_a_directory_of_claims_that_somebody_else_made_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    os.chown(tmp_path / "machine", 1234, 1234)
    with pytest.raises(EngineUnavailableError, match="belongs to user 1234"):
        ranges_of(tmp_path, "a").claim("x")
