"""Copying a hostile layer: what it costs is bounded, and nothing leads out of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.archive.archive_limits import Budget, ImageLimits
from atoll.archive.extract import Extraction
from atoll.archive.layer_copy import copy_layer
from atoll.archive.overlay import is_opaque_path, is_whiteout, mark_opaque, white_out
from atoll.archive.work import Work
from atoll.errors import ImageError
from needs import need

Copy = Callable[..., Extraction]


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    need("root")
    for name in ("layer", "lower", "copy"):
        (tmp_path / name).mkdir()
    return tmp_path / "layer"


@pytest.fixture
def copy(layer: Path) -> Iterator[Copy]:
    source, lower = (os.open(layer.parent / name, os.O_RDONLY) for name in ("layer", "lower"))

    def run(stubs: tuple[bytes, ...] = (), **limits: int) -> Extraction:
        return copy_layer(source, layer.parent / "copy", lower, Budget(ImageLimits(**limits)), Work(), stubs=stubs)

    yield run
    os.close(source)
    os.close(lower)


def listed(top: Path) -> list[str]:
    return sorted(str(path.relative_to(top)) for path in top.rglob("*"))


def test_a_tree_of_any_depth_is_refused(layer: Path, copy: Copy) -> None:
    here = os.open(layer, os.O_RDONLY)
    for _ in range(200):
        os.mkdir("d" * 100, dir_fd=here)
        here, last = os.open("d" * 100, os.O_RDONLY, dir_fd=here), here
        os.close(last)
    os.close(here)
    with pytest.raises(ImageError, match="directories deep"):
        copy()


@pytest.mark.parametrize(("size", "limit"), [(40 << 30, {}), (1000, {"total_bytes": 999})])
def test_what_seems_too_large_is_refused(layer: Path, copy: Copy, size: int, limit: dict[str, int]) -> None:
    with (layer / "huge").open("wb") as file:
        file.truncate(size)
    with pytest.raises(ImageError, match="more than"):
        copy(**limit)


def test_a_million_files_are_refused(layer: Path, copy: Copy) -> None:
    for number in range(20):
        (layer / str(number)).touch()
    with pytest.raises(ImageError, match="more than 19 entries"):
        copy(entries=19)


def test_links_are_copied_and_not_followed(layer: Path, copy: Copy) -> None:
    secret = layer.parent / "secret"
    secret.write_text("secret")
    (layer / "link").symlink_to(secret)
    (layer / "etc").symlink_to(layer.parent)
    copy(stubs=(b"etc/secret", b"link"))
    assert secret.read_text() == "secret"
    assert os.readlink(layer.parent / "copy/link") == str(secret)


def test_only_what_an_image_may_contain_is_copied(layer: Path, copy: Copy) -> None:
    os.mknod(layer / "disk", stat.S_IFBLK | 0o600, os.makedev(7, 0))
    os.mkfifo(layer / "pipe")
    (layer / "su").touch()
    (layer / "su").chmod(0o6755)
    os.setxattr(layer / "su", "user.mine", b"1")
    (layer / "shared").mkdir()
    (layer / "shared").chmod(0o3777)
    (layer.parent / "lower/pipe").write_text("below")
    told = copy()
    target = layer.parent / "copy"
    assert (told.devices_skipped, told.set_ids_stripped) == (2, 1)
    assert listed(target) == ["pipe", "shared", "su"]
    assert is_whiteout((target / "pipe").lstat())  # what is below must not come to light
    assert stat.S_IMODE((target / "su").lstat().st_mode) == 0o755
    assert stat.S_IMODE((target / "shared").lstat().st_mode) == 0o1777
    assert os.listxattr(target / "su") == []


def test_marks_of_an_overlay_are_kept_and_unchanged_directories_are_left_out(layer: Path, copy: Copy) -> None:
    for root in (layer, layer.parent / "lower"):
        for name in ("same", "hidden", "other"):
            (root / name).mkdir()
    (layer / "other").chmod(0o700)
    fds = [os.open(layer / name, os.O_RDONLY) for name in (".", "hidden")]
    white_out(fds[0], "gone")
    mark_opaque(fds[1])
    for fd in fds:
        os.close(fd)
    (layer / "mount/inner").mkdir(parents=True)
    (layer / "used/inner").mkdir(parents=True)
    (layer / "used/file").touch()
    copy(stubs=(b"mount", b"mount/inner", b"used", b"used/inner", b"/../x", b"nothing"))
    target = layer.parent / "copy"
    assert listed(target) == ["gone", "hidden", "other", "used", "used/file"]
    assert is_whiteout((target / "gone").lstat())
    assert is_opaque_path(target / "hidden")


def test_holes_stay_holes(layer: Path, copy: Copy) -> None:
    with (layer / "file").open("wb") as file:
        file.write(b"start")
        file.seek(5_000_000)
        file.write(b"middle")
        file.truncate(9_000_000)
    copy()
    target = layer.parent / "copy/file"
    assert target.read_bytes() == (layer / "file").read_bytes()
    assert target.stat().st_blocks * 512 < 1_000_000
