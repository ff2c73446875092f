"""Named volumes on a real pool: a loop-mounted btrfs in a temporary directory."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.errors import ConflictError, SandboxError, SpecError, VolumeNotFoundError
from atoll.model import Volume
from atoll.resources import VolumeSizes
from atoll.storage import BtrfsLayers, Volumes, btrfs
from needs import need

_FICLONE = 0x4004_9409
_MIB = 1 << 20
SIZE = 64 * _MIB


@pytest.fixture
def living() -> set[str]:
    """The ids of the sandboxes that exist."""
    return set()


@pytest.fixture
def volumes(tmp_path: Path, living: set[str]) -> Iterator[Volumes]:
    need("root", "mkfs.btrfs")
    yield Volumes(tmp_path, VolumeSizes(SIZE, 1 << 30), lambda each: each in living)
    BtrfsLayers(tmp_path).close()
    assert not os.path.ismount(tmp_path / "pool")


def filled(path: Path, count: int) -> bytes:
    content = os.urandom(count)
    with path.open("wb") as file:
        file.write(content)
        flush(file.fileno())
    return content


def make_files(path: Path, count: int) -> None:
    for number in range(count):
        (path / f"{number:0200}").touch()


def take_over(volumes: Volumes, hoard: Path, count: int) -> None:
    """Fill volumes, share their blocks with another one, and remove them."""
    for number in range(count):
        volumes.create("ann", f"source{number}", 8 * _MIB)
        source = volumes.use("ann", f"source{number}", "s", read_only=False)
        filled(source / "file", 6 * _MIB)
        with (source / "file").open("rb") as old, (hoard / str(number)).open("wb") as new:
            fcntl.ioctl(new, _FICLONE, old.fileno())
            flush(new.fileno())
        volumes.remove("ann", f"source{number}")


def flush(fd: int) -> None:
    """Write what the file system of a file has in memory to the disk. Raises OSError if a limit is in the way."""
    os.fsync(fd)
    ctypes.CDLL(None).syncfs(fd)


def subvolumes(volumes: Volumes) -> list[str]:
    """The data of all volumes that is on the disk, whether or not a record belongs to it."""
    with BtrfsLayers(volumes.data_dir).looking("x", saved=False) as place:
        return [path.name for path in place.parent.with_name("volumes").glob("*/data/*")]


def test_a_volume_is_made_on_first_use_and_found_again(volumes: Volumes) -> None:
    path = volumes.use("ann", "data", "one", read_only=False)
    (path / "file").write_text("kept")
    assert path.stat().st_mode & 0o7777 == 0o1777
    assert volumes.use("ann", "data", "two", read_only=True) == path
    assert [(each.name, each.owner, each.size_bytes) for each in volumes.list("ann")] == [("data", "ann", SIZE)]
    assert volumes.get("ann", "data") == volumes.ensure("ann", "data")


def test_nobody_but_root_reaches_the_files_of_a_volume(volumes: Volumes) -> None:
    path = volumes.use("ann", "data", "one", read_only=False)
    closed = [each for each in path.parents if each.stat().st_mode & 0o077 == 0]
    assert any(each.name == "volumes" for each in closed)


def test_each_owner_has_volumes_of_their_own(volumes: Volumes) -> None:
    paths = {
        volumes.use(owner, "data", "s", read_only=False) for owner in ("", "ann", "bob", "../ann", "a/b", "x" * 256)
    }
    assert len(paths) == 6
    with pytest.raises(VolumeNotFoundError):
        volumes.get("eve", "data")
    assert volumes.list("eve") == []
    volumes.remove("eve", "data")
    assert len(volumes.list(None)) == 6


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", ".x", "@x", "a" * 64, "a\0", "ä", "x\n"])
def test_a_name_that_could_be_a_path_is_none(volumes: Volumes, name: str) -> None:
    for attempt in (volumes.create, volumes.ensure, volumes.get, volumes.remove):
        with pytest.raises(SpecError):
            attempt("ann", name)
    assert volumes.list(None) == []


def test_a_volume_in_use_is_neither_removed_nor_restored(volumes: Volumes, living: set[str]) -> None:
    living |= {"one", "two"}
    for each in ("one", "two"):
        volumes.use("ann", "data", each, read_only=True)
    volumes.copy("ann", "data", "before", read_only=True)
    for attempt in (lambda: volumes.remove("ann", "data"), lambda: volumes.restore("ann", "data", "before")):
        with pytest.raises(ConflictError, match="one, two"):
            attempt()
    volumes.release("ann", "data", "one")
    assert volumes.users(volumes.get("ann", "data")) == ["two"]
    living.clear()  # it ended without a word
    volumes.remove("ann", "data")
    with pytest.raises(VolumeNotFoundError):
        volumes.get("ann", "data")


def test_a_volume_holds_what_its_size_says(volumes: Volumes) -> None:
    volumes.create("ann", "data", 8 * _MIB)
    path = volumes.use("ann", "data", "s", read_only=False)
    with pytest.raises(OSError, match=r"quota|space") as raised:
        filled(path / "big", 12 * _MIB)
    assert raised.value.errno in (errno.EDQUOT, errno.ENOSPC)
    assert volumes.is_full("ann", "data")
    assert volumes.used_bytes(volumes.get("ann", "data")) <= 8 * _MIB
    other = volumes.use("ann", "other", "s", read_only=False)
    filled(other / "small", _MIB)  # the neighbour is not affected
    assert not volumes.is_full("ann", "other")


def test_sizes_are_checked(volumes: Volumes) -> None:
    for size in (1, 2 << 30):
        with pytest.raises(SpecError):
            volumes.create("ann", "data", size)
    assert volumes.list("ann") == []


@pytest.mark.slow
def test_empty_files_without_end_are_bounded_by_the_size(volumes: Volumes) -> None:
    volumes.create("ann", "data", _MIB)
    path = volumes.use("ann", "data", "s", read_only=False)
    with pytest.raises(OSError, match=r"quota|space"):
        make_files(path, 50_000)


def test_a_copy_shares_blocks_and_counts_what_it_has(volumes: Volumes) -> None:
    path = volumes.use("ann", "data", "s", read_only=False)
    content = filled(path / "file", 4 * _MIB)
    copy = volumes.copy("ann", "data", "copy", read_only=True)
    (path / "file").write_bytes(b"changed")
    found = volumes.use("ann", "copy", "s", read_only=True)
    assert (found / "file").read_bytes() == content
    assert copy.inherited_bytes >= 4 * _MIB or not btrfs.counts_shared_data_once(path)
    assert volumes.used_bytes(copy) >= 4 * _MIB
    with pytest.raises(SpecError, match="read-only"):
        volumes.use("ann", "copy", "s", read_only=False)
    with pytest.raises(SpecError, match="fit"):
        volumes.copy("ann", "data", "small", size_bytes=_MIB)
    with pytest.raises(ConflictError):
        volumes.copy("ann", "data", "copy")
    with pytest.raises(VolumeNotFoundError):
        volumes.copy("bob", "data", "stolen")
    assert len(subvolumes(volumes)) == 2


def test_a_chain_of_copies_does_not_hold_more_than_their_sizes(volumes: Volumes) -> None:
    """Each copy has what it inherited in its size, although another subvolume wrote it."""
    volumes.create("ann", "v0", 16 * _MIB)
    path = volumes.use("ann", "v0", "s", read_only=False)
    filled(path / "file", 10 * _MIB)
    volumes.copy("ann", "v0", "v1")
    volumes.remove("ann", "v0")
    path = volumes.use("ann", "v1", "s", read_only=False)
    with pytest.raises(OSError, match=r"quota|space"):
        filled(path / "more", 10 * _MIB)


def test_blocks_that_a_volume_took_from_a_removed_one_count_for_the_owner(volumes: Volumes) -> None:
    """Sharing blocks costs nothing; so without an account, removing the source would make them free."""
    volumes.create("ann", "hoard", 8 * _MIB)
    hoard = volumes.use("ann", "hoard", "s", read_only=False)
    with pytest.raises(OSError, match=r"quota|space"):
        take_over(volumes, hoard, 8)
    assert len(os.listdir(hoard)) <= 4
    filled(volumes.use("bob", "data", "s", read_only=False) / "file", 24 * _MIB)  # a neighbour is not affected


def test_a_restored_volume_has_the_content_of_its_snapshot(volumes: Volumes) -> None:
    path = volumes.use("ann", "data", "s", read_only=False)
    filled(path / "file", _MIB)
    volumes.copy("ann", "data", "before", read_only=True)
    (path / "file").unlink()
    (path / "wrong").touch()
    restored = volumes.restore("ann", "data", "before")
    path = volumes.use("ann", "data", "s", read_only=False)
    assert os.listdir(path) == ["file"]
    assert (restored.read_only, restored.source, restored.size_bytes) == (False, "before", SIZE)
    (path / "file").write_text("new")
    assert (volumes.use("ann", "before", "s", read_only=True) / "file").stat().st_size == _MIB
    assert len(subvolumes(volumes)) == 2


def test_caches_are_not_listed_and_the_oldest_go_first(volumes: Volumes, living: set[str]) -> None:
    names = [Volume.cache(f"id-{number}", "/c").name for number in range(4)]
    for number, name in enumerate(names):
        filled(volumes.use("ann", name, f"s{number}", read_only=False) / "file", _MIB)
        os.utime(next((volumes.data_dir / "pool/volumes").glob(f"*/records/{name}.json")), (number, number))
    living.add("s0")  # the oldest is in use
    assert volumes.list("ann") == []
    assert volumes.evict_caches("ann", 3 * _MIB) >= 2 * _MIB
    left = {record.name for record in volumes.list("ann", caches=True)}
    assert left == {names[0], names[3]}
    volumes.evict_caches("ann", 1 << 30, keep=1)
    assert {record.name for record in volumes.list("ann", caches=True)} == {names[0]}


def test_of_many_who_make_the_same_volume_at_once_all_get_it(volumes: Volumes) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: volumes.use("ann", "data", f"s{number}", read_only=False), range(40)))
    assert len({*found}) == 1
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: _outcome(volumes), range(16)))
    assert done.count("made") == 1
    assert len(volumes.list("ann")) == 2


def _outcome(volumes: Volumes) -> str:
    try:
        volumes.create("ann", "other")
    except ConflictError:
        return "taken"
    return "made"


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(12, id="often"),
        pytest.param(1000, id="always", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_whenever_it_is_killed_there_are_whole_volumes_and_no_others(volumes: Volumes, kills: int) -> None:
    program = Path(__file__).with_name("volume_killing.py")
    done = subprocess.run(
        [sys.executable, program, str(volumes.data_dir), str(kills)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for record in volumes.list(None):
        volumes.remove(record.owner, record.name)
    assert subvolumes(volumes) == []


def test_whatever_is_called_first_mounts_the_pool(volumes: Volumes) -> None:
    volumes.create("ann", "data")
    for first in (
        lambda: volumes.copy("ann", "data", "copy"),
        lambda: volumes.restore("ann", "data", "copy"),
        lambda: volumes.used_bytes(volumes.get("ann", "data")),
        lambda: volumes.evict_caches("ann", 0),
        lambda: volumes.remove("ann", "data"),
    ):
        BtrfsLayers(volumes.data_dir).close()
        assert not os.path.ismount(volumes.data_dir / "pool")
        first()


def test_leftovers_of_a_dead_process_are_removed_and_nothing_else(volumes: Volumes, living: set[str]) -> None:
    living.add("s")
    path = volumes.use("ann", "data", "s", read_only=False)
    btrfs.create_subvolume(path.with_name("stray"))
    (path.parent.with_name("users") / "stray").mkdir()
    assert len(volumes.sweep()) == 1
    assert volumes.sweep() == []
    assert volumes.users(volumes.get("ann", "data")) == ["s"]
    assert path.is_dir()


def test_what_belongs_to_volumes_is_gone_with_the_last_of_an_owner(volumes: Volumes) -> None:
    filled(volumes.use("ann", "data", "s", read_only=False) / "file", _MIB)
    volumes.remove("ann", "data")
    home = volumes.data_dir / "pool/volumes"
    with BtrfsLayers(volumes.data_dir).looking("x", saved=False):
        until = time.monotonic() + 30
        while list(home.iterdir()) and time.monotonic() < until:
            btrfs.free_soon(home)
            volumes.sweep()
        assert list(home.iterdir()) == []
        assert btrfs.accounts(home) == []


def test_the_sweep_of_layers_spares_the_accounts_of_volumes(volumes: Volumes) -> None:
    path = volumes.use("ann", "data", "s", read_only=False)
    with BtrfsLayers(volumes.data_dir).looking("x", saved=False):
        before = btrfs.accounts(path)
        BtrfsLayers(volumes.data_dir).sweep()
        assert btrfs.accounts(path) == before != []


def test_a_broken_record_is_no_volume_and_harms_no_other(volumes: Volumes) -> None:
    volumes.create("ann", "data")
    broken = next((volumes.data_dir / "pool/volumes").glob("*/records/data.json"))
    broken.with_name("other.json").write_text("{")
    assert [record.name for record in volumes.list("ann")] == ["data"]
    with pytest.raises(SandboxError):
        volumes.get("ann", "other")
