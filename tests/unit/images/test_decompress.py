from __future__ import annotations

import bz2
import gzip
import lzma
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.archive.archive_limits import MIB, ImageLimits
from atoll.errors import ImageError
from needs import needs
from unit.images.archives import file, small_root, tar
from unit.images.conftest import Unpack


def _zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q", "-c"], input=data, stdout=subprocess.PIPE, check=True).stdout


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "bzip2": bz2.compress,
    "zstd": _zstd,
}
needs_zstd = needs("zstd")
packers = pytest.mark.parametrize(
    "packer", [pytest.param(name, marks=needs_zstd if name == "zstd" else ()) for name in PACKERS]
)


@packers
def test_packed_archives_are_unpacked_whatever_their_name(packer: str, unpack: Unpack, root: Path) -> None:
    unpack(PACKERS[packer](small_root(file("big", bytes(3 * MIB)))))
    assert (root / "etc/os-release").read_bytes() == b"ID=test\n"
    assert (root / "big").stat().st_size == 3 * MIB


@packers
def test_several_streams_in_a_row_are_one_archive(packer: str, unpack: Unpack, root: Path) -> None:
    archive, pack = small_root(), PACKERS[packer]
    unpack(pack(archive[:700]) + pack(archive[700:]))
    assert (root / "usr/bin/true").exists()


@packers
def test_a_packed_archive_that_is_cut_off_is_refused(packer: str, unpack: Unpack) -> None:
    packed = PACKERS[packer](small_root())
    for length in range(6, len(packed), max(1, len(packed) // 20)):
        with pytest.raises(ImageError):
            unpack(packed[:length])


@packers
def test_damaged_or_followed_by_garbage_it_is_refused(packer: str, unpack: Unpack) -> None:
    packed = PACKERS[packer](small_root())
    damaged = bytearray(packed)
    damaged[len(packed) // 2] ^= 0xFF
    for bad in (bytes(damaged), packed + b"garbage"):
        with pytest.raises(ImageError):
            unpack(bad)


@packers
def test_a_decompression_bomb_is_stopped_early(packer: str, unpack: Unpack, root: Path) -> None:
    bomb = PACKERS[packer](tar(file("zeros", bytes(200 * MIB))))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ImageError, match="100 times its size"):
        unpack(bomb)
    assert (root / "zeros").stat().st_size <= 65 * MIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def test_the_ratio_can_be_raised(unpack: Unpack, root: Path) -> None:
    unpack(gzip.compress(tar(file("zeros", bytes(8 * MIB)))), limits=ImageLimits(ratio=5000, ratio_free_bytes=0))
    assert (root / "zeros").stat().st_size == 8 * MIB


@needs_zstd
def test_a_zstd_frame_that_wants_much_memory_is_refused(unpack: Unpack) -> None:
    argv = ["zstd", "-q", "-c", "--ultra", "--long=30", "-1"]
    packed = subprocess.run(argv, input=tar(file("f", b"x" * 5000)), stdout=subprocess.PIPE, check=True).stdout
    with pytest.raises(ImageError, match="damaged"):
        unpack(packed)


def test_without_the_program_zstd_the_error_says_what_to_install(
    unpack: Unpack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ImageError) as caught:
        unpack(b"\x28\xb5\x2f\xfd" + bytes(100))
    assert caught.value.hint == "apt-get install zstd"
