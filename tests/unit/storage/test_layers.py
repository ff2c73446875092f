"""Writable layers on a real pool: a loop-mounted btrfs in a temporary directory, gone afterwards."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.errors import EngineError
from atoll.storage import BtrfsLayers, Layers, PlainLayers, btrfs, open_layers
from needs import need, needs


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[BtrfsLayers]:
    need("root", "mkfs.btrfs")
    found = BtrfsLayers(tmp_path)
    yield found
    for layer_id in found.list():
        found.delete_layer(layer_id)
    found.close()
    assert not os.path.ismount(tmp_path / "pool")


@pytest.fixture(params=["plain", "btrfs"])
def layers(request: pytest.FixtureRequest, tmp_path: Path) -> Layers:
    if request.param == "plain":
        return PlainLayers(tmp_path / "layers")
    found: BtrfsLayers = request.getfixturevalue("pool")
    return found


def until_refused(action: Callable[[int], object], most: int) -> int:
    """How often it worked before the quota said no."""
    for number in range(most):
        try:
            action(number)
        except OSError as error:
            if error.errno in (errno.EDQUOT, errno.ENOSPC):
                return number
            raise
    raise AssertionError(f"nothing was refused in {most} times")


def test_a_layer_is_empty_listed_and_private(layers: Layers) -> None:
    layer = layers.create_layer("a", None)
    assert sorted(os.listdir(layer.path)) == ["upper", "work"]
    assert layer.path.stat().st_mode & 0o777 == 0o700
    assert layers.list() == ["a"]


def test_a_layer_is_not_made_twice(layers: Layers) -> None:
    layers.create_layer("a", None)
    with pytest.raises(EngineError, match="already"):
        layers.create_layer("a", None)
    assert layers.list() == ["a"]


def test_deleting_takes_all_with_it_and_may_be_repeated(layers: Layers) -> None:
    layer = layers.create_layer("a", None)
    (layer.path / "upper/sub").mkdir(mode=0o000)
    (layer.path / "upper/link").symlink_to("/")
    layers.delete_layer("a")
    layers.delete_layer("a")
    assert layers.list() == []
    assert not layer.path.exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "-rf", "a\n", "A" * 100, ".hidden"])
def test_names_cannot_leave_the_directory(layers: Layers, name: str) -> None:
    with pytest.raises(EngineError, match="name of a layer"):
        layers.create_layer(name, None)
    with pytest.raises(EngineError, match="name of a layer"):
        layers.delete_layer(name)


def test_a_limit_that_is_not_enforced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="disk limit"):
        PlainLayers(tmp_path).create_layer("a", 1 << 20)
    assert not os.listdir(tmp_path)


def test_a_disk_limit_is_a_wall(pool: BtrfsLayers) -> None:
    layer = pool.create_layer("a", 16 << 20)
    neighbour = pool.create_layer("b", None)
    with open(layer.path / "upper/file", "wb", 0) as file:
        refused = until_refused(lambda _: file.write(b"x" * (1 << 20)), 64)
    assert 12 <= refused <= 17
    (neighbour.path / "upper/file").write_bytes(b"x" * (20 << 20))


def test_a_flood_of_empty_files_ends(pool: BtrfsLayers) -> None:
    layer = pool.create_layer("a", 2 << 20)
    made = until_refused(
        lambda number: os.close(os.open(layer.path / f"upper/{number:0200d}", os.O_CREAT | os.O_WRONLY)), 200_000
    )
    assert made > 10


def test_usage_is_what_was_written(pool: BtrfsLayers) -> None:
    layer = pool.create_layer("a", 64 << 20)
    with open(layer.path / "upper/file", "wb") as file:
        file.write(b"x" * (8 << 20))
        file.flush()
        os.fsync(file.fileno())
    os.sync()
    usage = pool.usage("a")
    assert usage is not None
    assert 8 << 20 <= usage <= 10 << 20
    assert pool.usage("missing") is None


def test_the_pool_survives_being_let_go_while_it_holds_layers(pool: BtrfsLayers, tmp_path: Path) -> None:
    layer = pool.create_layer("a", None)
    (layer.path / "upper/file").write_text("kept")
    pool.close()
    assert BtrfsLayers(tmp_path).list() == ["a"]
    assert (layer.path / "upper/file").read_text() == "kept"


def test_an_empty_pool_is_unmounted_and_comes_back_when_needed(pool: BtrfsLayers, tmp_path: Path) -> None:
    pool.create_layer("a", None)
    pool.delete_layer("a")
    pool.close()
    pool.close()
    assert not os.path.ismount(tmp_path / "pool")
    pool.create_layer("b", 16 << 20)
    assert pool.list() == ["b"]


def test_many_at_once(layers: Layers) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: layers.create_layer(f"l{number}", None), range(40)))
        assert len(layers.list()) == 40
        list(threads.map(lambda number: layers.delete_layer(f"l{number}"), range(40)))
    assert layers.list() == []


def test_a_half_made_layer_is_found_and_removed(pool: BtrfsLayers) -> None:
    pool.create_layer("a", None)
    pool.delete_layer("a")
    directory = pool._pool.directory
    btrfs.create_subvolume(directory / "half")
    (directory / "plain").mkdir()
    assert pool.list() == ["half", "plain"]
    pool.delete_layer("half")
    pool.delete_layer("plain")
    assert pool.list() == []


@needs("root")
def test_root_gets_a_pool_where_one_can_be_made(tmp_path: Path) -> None:
    expected = BtrfsLayers if shutil.which("mkfs.btrfs") else PlainLayers
    assert isinstance(open_layers(tmp_path), expected)
    assert not os.listdir(tmp_path)


def test_a_layer_is_full_when_its_limit_is_reached_and_not_before(pool: BtrfsLayers) -> None:
    limited, free = pool.create_layer("a", 8 << 20), pool.create_layer("b", None)
    assert not pool.is_full("a")
    with open(limited.path / "upper/fill", "wb", buffering=0) as file:
        until_refused(lambda _: file.write(bytes(65536)), 1000)
    assert pool.is_full("a")
    (free.path / "upper/fill").write_bytes(bytes(16 << 20))
    assert not pool.is_full("b")
    assert not pool.is_full("no-such-layer")


def test_a_pool_whose_maker_died_is_put_away(pool: BtrfsLayers) -> None:
    pool.data_dir.mkdir(exist_ok=True)
    (pool.data_dir / ".pool.btrfs.draft").write_bytes(b"half")
    pool.close()
    assert not (pool.data_dir / ".pool.btrfs.draft").exists()
