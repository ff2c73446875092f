"""Archives unpacked by Atoll and by GNU tar: what both accept becomes the same files."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume
from hypothesis import strategies as st

from atoll.archive.archive_limits import Budget, ImageLimits
from atoll.archive.decompress import plain
from atoll.archive.extract import Extraction, extract
from atoll.archive.root import Root
from atoll.archive.work import Work
from atoll.errors import ImageError
from differential import explore, runs
from needs import needs
from unit.images.archives import block, file, long_name, padded, pax, symlink, tar
from unit.images.system_tar import SystemTar, contents, running

pytestmark = needs("root", "bwrap", "tar")
LIMITS = ImageLimits(file_bytes=1 << 20, total_bytes=8 << 20)


@pytest.fixture(scope="module")
def others() -> Iterator[SystemTar]:
    with running() as found:
        yield found


class Archive(bytes):
    """Shown in a length that can be read and pasted."""

    def __repr__(self) -> str:
        return f"Archive(zlib.decompress({zlib.compress(self)!r}))"


def unpack(archive: bytes, root: Path) -> Extraction:
    """Unpack into an empty directory. Raises ImageError."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    work = Work()
    with Root(root) as opened, plain(io.BytesIO(archive), LIMITS, work) as stream:
        return extract(stream, opened, Budget(LIMITS), work, whiteouts=False)


def assert_same(result: Extraction, ours: Path, theirs: Path) -> None:
    found, expected = contents(ours), contents(theirs)
    for path, what in found.items():
        # The time of a directory that is in the archive only as a part of names is 0 for us, and now for others.
        if what == ("directory", 0o755, 0) and expected.get(path, ())[:2] == what[:2]:
            expected[path] = what
    for path in sorted(expected, reverse=True):
        # A device that is skipped makes no directory to be in.
        is_empty = not any(other.startswith(path + b"/") for other in expected)
        if result.devices_skipped and path not in found and expected[path][0] == "directory" and is_empty:
            del expected[path]
    assert found == expected


PARTS = st.sampled_from(
    ("a", "b", "dir", "ü", ".wh.x", "x" * 60, "n" * 99, "with space", "line\nfeed", "\udcff", "é" * 40)
)
NAMES = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
MODES = st.sampled_from((0o644, 0o755, 0o600, 0o444, 0o1777, 0o4755, 0o2755, 0o7777, 0))
TIMES = st.sampled_from((0, 1, 1_700_000_000, 0o77777777777 - 1, 1_700_000_000.5, 1 << 32))
TARGETS = st.one_of(NAMES, st.sampled_from(("/etc/passwd", "../../x", ".", "t" * 150, "a//b/")))
FORMATS = st.sampled_from((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))


@st.composite
def members(draw: st.DrawFn, before: list[tarfile.TarInfo]) -> tuple[tarfile.TarInfo, bytes]:
    name = draw(NAMES)
    taken = {each.name: each.type for each in before}
    # A name appears once, and nothing is below anything but a directory.
    assume(name not in taken and not any(each.startswith(f"{name}/") for each in taken))
    assume(all(taken.get("/".join(name.split("/")[:end]), tarfile.DIRTYPE) == tarfile.DIRTYPE for end in range(1, 4)))
    member, data = tarfile.TarInfo(name), b""
    member.mode, member.mtime = draw(MODES), draw(TIMES)
    member.uid, member.gid = draw(st.sampled_from((0, 1000, 65535, 0o7777777))), draw(st.sampled_from((0, 5)))
    files = [each for each in before if each.type == tarfile.REGTYPE]
    kinds = [tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
    member.type = draw(st.sampled_from(kinds + [tarfile.LNKTYPE] * bool(files)))
    if member.type == tarfile.REGTYPE:
        data = b"0123456789" * 60 * draw(st.integers(0, 2)) + b"x" * draw(st.sampled_from((0, 1, 511, 512)))
        member.size = len(data)
    elif member.type == tarfile.LNKTYPE:
        member.linkname = draw(st.sampled_from(files)).name
    elif member.type == tarfile.SYMTYPE:
        member.linkname = draw(TARGETS)
    return member, data


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """Archives as tar programs make them."""
    stream = io.BytesIO()
    format_ = draw(FORMATS)
    with tarfile.open(fileobj=stream, mode="w", format=format_, encoding="utf-8", errors="surrogateescape") as archive:
        before: list[tarfile.TarInfo] = []
        for _ in range(draw(st.integers(1, 6))):
            member, data = draw(members(before))
            try:
                archive.addfile(member, io.BytesIO(data))
            except ValueError:  # a name or a number that does not fit into this format
                continue
            before.append(member)
    end = -(-len(stream.getvalue().rstrip(b"\0")) // 512) * 512
    return Archive(stream.getvalue()[: end + 1024])


@runs
def test_an_archive_becomes_the_same_files(times: int, others: SystemTar, tmp_path: Path) -> None:
    def check(archive: bytes) -> None:
        result = unpack(archive, tmp_path / "root")
        theirs = others.unpack(archive)
        assert theirs.messages == []
        assert_same(result, tmp_path / "root", theirs.folder)

    explore(check, archives(), examples=40, times=times)


FIELDS = {
    "name": (0, 100),
    "mode": (100, 8),
    "uid": (108, 8),
    "size": (124, 12),
    "mtime": (136, 12),
    "type": (156, 1),
    "link": (157, 100),
    "magic": (257, 8),
    "device": (329, 8),
    "prefix": (345, 155),
}
# fmt: off
TEXTS = st.sampled_from(
    [
        b"", b"\0", b" ", b"/", b"//a", b"./a", b"a/", b"a/./b", b"../a", b"a/../b", b"/a", b"a\0b", b"dir", b"dir/a",
        b".", b"x" * 155, b"/etc/passwd", b"..", b"../../../a", b"\xff", b"a\n",
    ]
)
NUMBERS = st.sampled_from(
    [
        b"", b"0", b"777", b"0000644\0", b" 644 ", b"644\0999", b"9", b"-1", b"+1", b"0x1", b"1\0", b"1000", b"\0001",
        b"1 1", b"\x80" + bytes(10) + b"\1", b"\x80" + b"\0" * 6 + b"\1", b"\xff" * 12, b"\x80" + b"\xff" * 11,
        b"\x81" + bytes(11), b"00000000001\0", b"00000001000 ", b"77777777777", b"        1", b"1" * 12,
        b"\xff\xff\xff\xff\xff\xff\xff\xfe",
    ]
)
# fmt: on
# Not `g`: what such a header says of all entries is passed over, as Docker does; GNU tar obeys it.
TYPES = st.sampled_from([bytes((letter,)) for letter in b"01234567\0xXLKSDMNVAQ \xff"])
MAGICS = st.sampled_from(
    (b"ustar\x0000", b"ustar  \0", b"\0" * 8, b"ustar\x0001", b"ustar\0\0\0", b"USTAR\x0000", b"tar")
)


def checksummed(block: bytes) -> bytes:
    return block[:148] + b"%06o\0 " % (sum(block[:148]) + 256 + sum(block[156:])) + block[156:]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Archives with something changed in the headers, whose checksums are right."""
    archive = draw(archives())
    heads = [at for at in range(0, len(archive), 512) if archive[at + 257 : at + 262] == b"ustar"]
    assume(heads)  # there are none if the format could hold none of the names
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(heads))
        name = draw(st.sampled_from(list(FIELDS)))
        start, length = FIELDS[name]
        chosen = {"type": TYPES, "magic": MAGICS, "name": TEXTS, "link": TEXTS, "prefix": TEXTS}.get(name, NUMBERS)
        value = draw(chosen)[:length]
        block = archive[at : at + 512]
        block = checksummed(block[:start] + value + bytes(length - len(value)) + block[start + length :])
        archive = archive[:at] + block + archive[at + 512 :]
    if draw(st.integers(0, 3)) == 0:  # the extended headers of pax have no checksum
        at = draw(st.integers(0, len(archive) - 1))
        archive = archive[:at] + bytes((draw(st.integers(0, 255)),)) + archive[at + 1 :]
    return Archive(archive)


@runs
def test_a_damaged_archive_is_refused_or_becomes_the_same_files(
    times: int, others: SystemTar, tmp_path: Path, outside: Path
) -> None:
    def check(archive: bytes) -> None:
        try:
            result = unpack(archive, tmp_path / "root")
        except ImageError:
            return
        assert sorted(os.listdir(tmp_path)) == ["outside", "root"]
        theirs = others.unpack(archive)
        if not theirs.messages:
            assert_same(result, tmp_path / "root", theirs.folder)

    explore(check, damaged(), examples=100, times=times)


@pytest.mark.parametrize(
    "options", ["--format=gnu", *(f"--format=posix --sparse-version={version}" for version in ("0.0", "0.1", "1.0"))]
)
def test_a_sparse_file_of_tar_is_refused(options: str, tmp_path: Path) -> None:
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 20)
        file.write(b"x")
        file.seek(1 << 19)
        file.write(b"y")
    made = ["tar", "-c", "--sparse", *options.split(), "-C", str(tmp_path), "hole"]
    archive = subprocess.run(made, check=True, stdout=subprocess.PIPE, timeout=60).stdout
    with pytest.raises(ImageError, match="sparse"):
        unpack(archive, tmp_path / "root")


NAME, OTHER = "a" * 120, "b" * 120
REFUSED = {
    "two extended headers": tar(pax({"path": NAME}), pax({"mtime": "1"}), file("x")),
    "two long names": tar(long_name(NAME.encode()), long_name(OTHER.encode()), file("x")),
    "a long name and a path": tar(long_name(NAME.encode()), pax({"path": OTHER}), file("x")),
    "two long targets": tar(pax({"linkpath": NAME}), long_name(OTHER.encode(), b"K"), symlink("x", "y")),
    "a name that goes on": tar(block(b"././@LongLink", b"L", size=3) + padded(b"abcdef"), file("x")),
    "a file named like a directory": tar(file("a/", b"")),
    "a contiguous file named like a directory": tar(block(b"a/", b"7")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_archive_with_two_readings_is_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(ImageError):
        unpack(REFUSED[case], tmp_path / "root")


def test_what_looks_like_it_has_one_reading(tmp_path: Path) -> None:
    """Each of these is what some program writes."""
    old_directory, old_file = block(b"old/", b"\0", mode=0o755), block(b"file", b"\0")
    unended = block(b"././@LongLink", b"L", size=120) + padded(NAME.encode())
    both = pax({"mtime": "1"}) + long_name(OTHER.encode())
    gnu = bytearray(block(b"gnu"))
    gnu[257:265], gnu[345:356] = b"ustar  \0", b"14524770400"  # GNU tar has other times where ustar has a prefix
    long_names = (unended, file("x", b"1"), both, file("x", b"2"))
    archive = tar(pax({"comment": "x"}, b"g"), old_directory, old_file, *long_names, checksummed(bytes(gnu)))
    unpack(archive, tmp_path / "root")
    assert sorted(os.listdir(tmp_path / "root")) == sorted(["old", "file", "gnu", NAME, OTHER])
    assert (tmp_path / "root" / OTHER).stat().st_mtime == 1
