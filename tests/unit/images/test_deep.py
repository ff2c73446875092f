"""Archives that are deeper than a call stack, a path or a table of descriptors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.archive.tree import measure
from atoll.archive.work import Work
from atoll.errors import ImageError
from atoll.images import Images
from atoll.walking import walk
from unit.images.archives import deep, directory, file, small_root, symlink, tar
from unit.images.conftest import Unpack

LEVELS = 1100


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(tmp_path / "data")


async def test_a_deep_image_is_refused_and_leaves_nothing(images: Images, tmp_path: Path) -> None:
    archive = tmp_path / "deep.tar"
    archive.write_bytes(tar(small_root()[:-1024], deep(LEVELS)))
    with pytest.raises(ImageError, match="512 directories in one another"):
        await images.import_tar(archive, "deep")
    assert os.listdir(images.store.directory / "tmp") == []


async def test_gc_gets_rid_of_what_a_killed_import_left(images: Images, unpack: Unpack, root: Path) -> None:
    await images.gc()  # makes the directories
    unpack(tar(deep(LEVELS)))
    left = images.store.directory / "tmp" / "left"
    root.rename(left)
    root.mkdir()
    assert (await images.gc()).leftovers == 1
    assert not left.exists()


@pytest.mark.parametrize("top", [file("d", b"now a file"), file(".wh.d")], ids=["replaces", "hides"])
def test_a_later_layer_removes_a_deep_directory(unpack: Unpack, root: Path, top: bytes) -> None:
    unpack(tar(deep(LEVELS)), tar(top))
    assert not (root / "d").is_dir()


@pytest.mark.usefixtures("few_descriptors")
def test_a_walk_holds_few_descriptors_and_goes_back_the_way_it_came(tmp_path: Path) -> None:
    """Beside each directory on the way is a file that comes after it."""
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d", dir_fd=here)
        os.close(os.open("e", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    fd = os.open(top, os.O_RDONLY)
    try:
        found = [each.path for each in walk(fd)]
    finally:
        os.close(fd)
    down = [b"/".join([b"d"] * depth) for depth in range(1, 301)]
    up = [b"/".join([b"d"] * depth + [b"e"]) for depth in range(299, -1, -1)]
    assert found == down + up
    assert measure(top, Work()).entries == 600


def test_a_digest_depends_on_names_and_contents_alone(tmp_path: Path, unpack: Unpack, root: Path) -> None:
    """Images that are there already keep theirs."""
    unpack(tar(directory("b"), file("b/c", b"1"), file("b.d", b"22"), symlink("a", "b/c"), directory("b/sub")))
    for path in (root, *root.rglob("*")):
        os.chown(path, 0, 0, follow_symlinks=False) if os.geteuid() == 0 else None
    found = measure(root, Work())
    assert (found.entries, found.size_bytes) == (5, 3)
    if os.geteuid() == 0:
        assert found.digest == "sha256:33121a97b042a5c5ac2f29e2df91c9638623de6895adc7b86b42f25b11c6e151"
