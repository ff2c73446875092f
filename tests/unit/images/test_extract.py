"""Archives of strangers. The fixture `outside` fails a test if anything beside the root has changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.archive.archive_limits import ImageLimits
from atoll.errors import ImageError
from needs import needs
from unit.images.archives import END, block, directory, file, hard_link, long_name, padded, pax, special, symlink, tar
from unit.images.conftest import Unpack

as_root = needs("root")


def _chain(depth: int = 16) -> list[bytes]:
    """Links whose expansion is longer than PATH_MAX, so that a resolver in user space loses track (CVE-2025-4517)."""
    component = "d" * 247
    entries, path = [], ""
    for letter in "abcdefghijklmnop"[:depth]:
        entries += [directory(f"{path}{component}"), symlink(f"{path}{letter}", component)]
        path += f"{component}/"
    short = "/".join("abcdefghijklmnop"[:depth])
    return [
        *entries,
        symlink(f"{short}/{'l' * 254}", "../" * depth),
        symlink("escape", f"{short}/{'l' * 254}/../../outside"),
    ]


REFUSED: dict[str, Callable[[Path], bytes]] = {
    "parent": lambda out: tar(file("../outside/canary", b"x")),
    "parent in the middle": lambda out: tar(directory("a"), file("a/../../outside/canary", b"x")),
    "parent by pax": lambda out: tar(pax({"path": "../outside/canary"}), file("harmless", b"x")),
    "parent by a long name": lambda out: tar(long_name(b"../outside/canary"), file("harmless", b"x")),
    "hard link to the outside": lambda out: tar(hard_link("a", "../outside/canary"), file("a", b"x")),
    "hard link to an absolute path": lambda out: tar(hard_link("a", f"{out}/canary"), file("a", b"x")),
    "hard link to the outside by pax": lambda out: tar(pax({"linkpath": f"{out}/canary"}), hard_link("a", "b")),
    "hard link through a link": lambda out: tar(symlink("l", str(out)), hard_link("a", "l/canary"), file("a", b"x")),
    "hard link to a link": lambda out: tar(symlink("l", f"{out}/canary"), hard_link("a", "l")),
    "hard link to a directory": lambda out: tar(directory("d"), hard_link("a", "d")),
    "below a link to the outside": lambda out: tar(symlink("l", str(out)), file("l/canary", b"x")),
    "below a relative link to the outside": lambda out: tar(symlink("l", "../outside"), file("l/canary", b"x")),
    "below two links": lambda out: tar(symlink("m", "l"), symlink("l", "../outside"), file("m/canary", b"x")),
    "below a link to a process's root": lambda out: tar(symlink("l", f"/proc/self/root{out}"), file("l/canary", b"x")),
    "long chain of links": lambda out: tar(*_chain(), file("escape/canary", b"x")),
    "long chain of links, hard link": lambda out: tar(*_chain(), hard_link("a", "escape/canary")),
    "links in a circle": lambda out: tar(symlink("a", "b"), symlink("b", "a"), file("a/x", b"x")),
    "below a file": lambda out: tar(file("a", b""), file("a/b", b"x")),
    "root as a link": lambda out: tar(symlink("./", str(out))),
    "root as a file": lambda out: tar(file("/", b"x")),
    "whiteout of the parent": lambda out: tar(file(".wh..", b"")),
    "whiteout of the grandparent": lambda out: tar(file(".wh...", b"")),
    "whiteout with a bad parent": lambda out: tar(file("../.wh.outside", b"")),
    "below a whiteout": lambda out: tar(file(".wh.a/b", b"")),
    "zero byte in a pax path": lambda out: tar(pax({"path": b"a\0b"}), file("x")),
    "global path": lambda out: tar(pax({"path": "etc/passwd"}, b"g"), file("x")),
    "sparse, old GNU": lambda out: tar(block(b"s", b"S", size_field=b"\x80" + bytes(3) + b"\x7f" + b"\xff" * 7)),
    "sparse by pax": lambda out: tar(pax({"GNU.sparse.realsize": str(2**63 - 1)}), file("s")),
    "8 EiB by pax": lambda out: tar(pax({"size": str(2**63 - 1)}), file("s")),
    "8 EiB in the header": lambda out: tar(block(b"s", size=2**63 - 1)),
    "negative size": lambda out: tar(block(b"s", size_field=b"\xff" * 12)),
    "negative size by pax": lambda out: tar(pax({"size": "-512"}), file("s")),
    "pax header of 1 GB": lambda out: tar(block(b"p", b"x", size=10**9)),
    "long name of 1 GB": lambda out: tar(block(b"p", b"L", size=10**9)),
    "endless extended headers": lambda out: tar(*[pax({"comment": "x"})] * 100, file("a")),
    "pax length too large": lambda out: tar(block(b"p", b"x", size=9) + padded(b"99 a=bcd\n"), file("a")),
    "pax length zero": lambda out: tar(block(b"p", b"x", size=9) + padded(b"0 a=bcde\n"), file("a")),
    "unknown type": lambda out: tar(block(b"a", b"Q")),
    "component of 256 bytes": lambda out: tar(file("n" * 256)),
    "link without a target": lambda out: tar(symlink("a", "")),
    "link with an endless target": lambda out: tar(pax({"linkpath": "a" * 5000}), symlink("a", "b")),
    "not an archive": lambda out: b"This is a text, not an archive. " * 100,
    "empty": lambda out: b"",
    "something after the end": lambda out: tar(file("a")) + b"garbage",
    "extended header, then the end": lambda out: tar(pax({"path": "a"})),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_hostile_archive_is_refused_and_nothing_outside_changes(case: str, unpack: Unpack, outside: Path) -> None:
    with pytest.raises(ImageError) as caught:
        unpack(REFUSED[case](outside))
    assert "\n" not in caught.value.reason
    assert len(caught.value.reason) < 400


def test_absolute_names_mean_the_root_of_the_image(unpack: Unpack, root: Path, outside: Path) -> None:
    unpack(tar(file(f"{outside}/canary", b"inside"), file("//etc///./motd", b"hello")))
    assert (root / "etc/motd").read_bytes() == b"hello"
    assert Path(f"{root}{outside}/canary").read_bytes() == b"inside"


def test_links_to_absolute_paths_are_kept_and_followed_only_inside(unpack: Unpack, root: Path) -> None:
    unpack(
        tar(
            directory("usr/bin"),
            symlink("bin", "/usr/bin"),
            symlink("up", "../../../usr"),
            file("bin/sh", b"#!"),
            file("up/x"),
        )
    )
    assert os.readlink(root / "bin") == "/usr/bin"
    assert (root / "usr/bin/sh").read_bytes() == b"#!"
    assert (root / "usr/x").exists()


def test_writing_over_a_link_replaces_the_link(unpack: Unpack, root: Path, outside: Path) -> None:
    unpack(
        tar(
            symlink("a", f"{outside}/canary"), file("a", b"new"), symlink("d", str(outside)), directory("d", mode=0o700)
        )
    )
    assert (root / "a").read_bytes() == b"new"
    assert not (root / "a").is_symlink()
    assert (root / "d").is_dir()
    assert not (root / "d").is_symlink()


def test_writing_over_a_hard_link_leaves_the_other_name_alone(unpack: Unpack, root: Path) -> None:
    unpack(tar(file("a", b"first"), hard_link("b", "a"), file("b", b"second"), hard_link("a", "a")))
    assert (root / "a").read_bytes() == b"first"
    assert (root / "b").read_bytes() == b"second"


def test_directories_and_files_replace_each_other(unpack: Unpack, root: Path) -> None:
    unpack(
        tar(directory("a"), file("a/x", b"x"), file("b", b"b")),
        tar(file("a", b"now a file"), directory("b"), file("b/y", b"y")),
    )
    assert (root / "a").read_bytes() == b"now a file"
    assert (root / "b/y").read_bytes() == b"y"


def test_the_meaning_of_a_path_follows_a_replaced_link(unpack: Unpack, root: Path) -> None:
    unpack(tar(directory("x"), directory("y"), symlink("l", "x"), file("l/1"), symlink("l", "y"), file("l/2")))
    assert [path.name for path in (root / "x").iterdir()] == ["1"]
    assert [path.name for path in (root / "y").iterdir()] == ["2"]


def test_devices_and_pipes_are_skipped_and_reported(unpack: Unpack, root: Path) -> None:
    result = unpack(
        tar(
            special("dev/mem", b"3", (1, 1)),
            special("dev/vda", b"4", (254, 0)),
            special("p", b"6"),
            hard_link("q", "p"),
            file("f"),
        )
    )
    assert result.devices_skipped == 4
    assert "'dev/mem'" in result.notes[0]
    assert [path.name for path in root.iterdir()] == ["f"]


def test_a_whiteout_device_of_overlay_hides_nothing(unpack: Unpack, root: Path) -> None:
    unpack(tar(file("a", b"a")), tar(special("b", b"3", (0, 0))))
    assert sorted(path.name for path in root.iterdir()) == ["a"]


def test_set_id_bits_are_stripped_and_the_sticky_bit_of_directories_stays(unpack: Unpack, root: Path) -> None:
    result = unpack(tar(file("su", b"", mode=0o6755), directory("tmp", mode=0o7777)))
    assert stat.S_IMODE((root / "su").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "tmp").stat().st_mode) == 0o1777
    assert result.set_ids_stripped == 1


def test_extended_attributes_are_never_applied(unpack: Unpack, root: Path) -> None:
    capability = b"\x01\0\0\x02" + b"\xff" * 16
    names = (
        "security.capability",
        "trusted.overlay.opaque",
        "trusted.overlay.redirect",
        "user.overlay.metacopy",
        "user.x",
    )
    records: dict[str, str | bytes] = {f"SCHILY.xattr.{name}": capability for name in names}
    unpack(tar(pax(records), file("f", b"x"), pax(records), directory("d")))
    assert os.listxattr(root / "f") == []
    assert os.listxattr(root / "d") == []


@as_root
def test_owners_are_kept_and_those_out_of_range_become_nobody(unpack: Unpack, root: Path) -> None:
    unpack(
        tar(
            file("a", uid=1000, gid=65535),
            file("b", uid=65536, gid=2**31),
            pax({"uid": "4294967295", "gid": "7"}),
            file("c"),
            symlink("d", "a", uid=33, gid=33),
            directory("e", uid=5, gid=6),
            file("e/f"),
        )
    )
    owners = {path.name: (path.lstat().st_uid, path.lstat().st_gid) for path in root.iterdir()}
    assert owners == {"a": (1000, 65535), "b": (65534, 65534), "c": (65534, 7), "d": (33, 33), "e": (5, 6)}


def test_times_and_modes_of_directories_survive_what_is_put_into_them(unpack: Unpack, root: Path) -> None:
    unpack(tar(directory("d", mode=0o555), file("d/f")))
    assert (root / "d").stat().st_mtime == 1_700_000_000
    assert stat.S_IMODE((root / "d").stat().st_mode) & 0o077 == 0o055


def test_whiteouts_remove_what_lower_layers_had_and_no_marker_stays(unpack: Unpack, root: Path) -> None:
    lower = tar(
        directory("d"),
        file("d/old", b"1"),
        file("d/sub/deep", b"2"),
        file("gone", b"3"),
        directory("tree"),
        file("tree/x"),
    )
    upper = tar(
        file("d/new", b"4"),
        file("d/.wh..wh..opq"),
        file(".wh.gone"),
        file(".wh.tree"),
        file(".wh.absent"),
        file(".wh..wh.plnk"),
    )
    unpack(lower, upper)
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == ["d", "d/new"]


def test_a_whiteout_does_not_remove_what_its_own_layer_has(unpack: Unpack, root: Path) -> None:
    unpack(tar(file("a", b"old")), tar(file("a", b"new"), file(".wh.a")))
    assert (root / "a").read_bytes() == b"new"


def test_an_opaque_directory_that_is_a_link_removes_nothing_elsewhere(
    unpack: Unpack, root: Path, outside: Path
) -> None:
    unpack(
        tar(symlink("d", str(outside)), symlink("e", "f"), file("f/kept")),
        tar(file("d/.wh..wh..opq"), file("e/.wh..wh..opq")),
    )
    assert (root / "f/kept").exists()


def test_a_whiteout_through_a_link_stays_inside(unpack: Unpack, root: Path, outside: Path) -> None:
    unpack(tar(symlink("d", str(outside))), tar(file("d/.wh.canary")))
    assert os.readlink(root / "d") == str(outside)


def test_names_may_be_any_bytes(unpack: Unpack, root: Path) -> None:
    names = [b"\xff\xfe", "ünï".encode(), b"new\nline", b"-rf", b"a b", b"\x1b[31m"]
    unpack(tar(*(file(name, b"x") for name in names)))
    assert sorted(os.listdir(os.fsencode(root))) == sorted(names)


def test_long_names_of_gnu_and_pax_are_understood(unpack: Unpack, root: Path) -> None:
    long = "/".join(["d" * 200] * 5)
    unpack(tar(long_name(f"{long}/gnu".encode()), file("cut", b"1"), file(f"{long}/pax", b"2")))
    assert (root / long / "gnu").read_bytes() == b"1"
    assert (root / long / "pax").read_bytes() == b"2"


@pytest.mark.parametrize(
    ("limits", "archive"),
    [
        (ImageLimits(entries=100), tar(*(file(f"f{number}") for number in range(101)))),
        (ImageLimits(entries=100), tar(file("/".join(["d"] * 120)))),
        (ImageLimits(entries=100), tar(*[file("same")] * 101)),
        (ImageLimits(total_bytes=10_000), tar(*(file(f"f{number}", bytes(1000)) for number in range(11)))),
        (ImageLimits(total_bytes=10_000), tar(*[file(".wh.x", bytes(1000))] * 11)),
        (ImageLimits(file_bytes=1000), tar(file("f", bytes(1001)))),
        (ImageLimits(depth=10), tar(file("/".join(["d"] * 11)))),
        (ImageLimits(path_bytes=50), tar(file("d" * 51))),
        (ImageLimits(pax_bytes=1000), tar(pax({"comment": "x" * 1001}), file("f"))),
        (ImageLimits(total_bytes=10_000), tar(file("f")) + bytes(20_000)),
    ],
    ids=[
        "entries",
        "implied directories",
        "same name",
        "bytes",
        "skipped bytes",
        "file",
        "depth",
        "path",
        "pax",
        "padding",
    ],
)
def test_what_is_over_a_limit_is_refused(limits: ImageLimits, archive: bytes, unpack: Unpack) -> None:
    with pytest.raises(ImageError):
        unpack(archive, limits=limits)
    unpack(tar(file("f", b"x")), limits=limits)


ARCHIVE = tar(
    directory("d"),
    file("d/a", os.urandom(3000)),
    symlink("l", "d/a"),
    pax({"path": "p" * 200}),
    file("x", b"y"),
    hard_link("h", "d/a"),
)


def test_an_archive_that_is_cut_off_anywhere_is_refused(unpack: Unpack) -> None:
    for length in range(0, len(ARCHIVE) - len(END), 97):
        with pytest.raises(ImageError):
            unpack(ARCHIVE[:length])
    unpack(ARCHIVE)


def test_an_archive_without_an_end_mark_is_accepted_only_if_it_is_known_to_be_complete(unpack: Unpack) -> None:
    unpack(ARCHIVE[: -len(END)], require_end=False)
    with pytest.raises(ImageError, match="cut off"):
        unpack(ARCHIVE[: -len(END)])


def test_flipped_bits_end_in_an_image_or_an_error_and_never_outside(unpack: Unpack) -> None:
    """Bits of names and data may be flipped unnoticed here; digests find them. Only ImageError may come out."""
    for position in range(0, len(ARCHIVE), 13):
        damaged = bytearray(ARCHIVE)
        damaged[position] ^= 1 << (position % 8)
        try:
            unpack(bytes(damaged))
        except ImageError:
            continue
