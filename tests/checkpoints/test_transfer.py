"""Files that are no snapshots, damaged, or made to escape."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.archive.archive_limits import ImageLimits
from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.states import snapshot_file
from atoll.errors import ImageError, ImageNotFoundError, SandboxError
from checkpoints.conftest import MakeSandbox


def parcel(entries: list[tarfile.TarInfo], **header: Any) -> bytes:
    """As a stranger could make it: the digest is right."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for entry in entries:
            archive.addfile(entry, io.BytesIO(bytes(entry.size)))
    first = {
        "format": "atoll-snapshot",
        "version": 1,
        "name": "x",
        "created_at": 0,
        "size_bytes": 1,
        "base": {"image": "host"},
        "inner": "rootfs",
        "removed": [],
        "opaque": [],
        **header,
    }
    content = json.dumps(first).encode() + b"\n" + gzip.compress(packed.getvalue())
    return content + hashlib.sha256(content).hexdigest().encode() + b"\n"


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **more: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    for key, value in more.items():
        setattr(made, key, value)
    return made


@pytest.fixture
async def exported(native: LinuxEngine, sandbox_on: MakeSandbox, tmp_path: Path) -> Path:
    async with sandbox_on(native) as sandbox:
        await sandbox.exec("head -c 300000 /dev/urandom >file")
        await sandbox.snapshot("mine")
    await native.export_snapshot("mine", tmp_path / "file")
    return tmp_path / "file"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "text": lambda content: b"hello\nworld\n",
    "cut": lambda content: content[: len(content) // 2],
    "cut by one": lambda content: content[:-1],
    "longer": lambda content: content + b"x",
    "one bit": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "header": lambda content: content.replace(b'"size_bytes": ', b'"size_bytes": 1', 1),
    "no line": lambda content: content.replace(b"\n", b" "),
    "version": lambda content: content.replace(b'"version": 1', b'"version": 2', 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_is_told(native: LinuxEngine, exported: Path, damage: str) -> None:
    exported.write_bytes(DAMAGES[damage](exported.read_bytes()))
    with pytest.raises(ImageError):
        await native.import_snapshot(exported, "other")
    assert [each.name for each in await native.snapshots()] == ["mine"]
    assert len(native.layout.layers.list_saved()) == 1


async def test_a_file_that_is_not_there(native: LinuxEngine, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="No such file"):
        await native.import_snapshot(tmp_path / "nothing", "other")
    with pytest.raises(SandboxError, match="could not be written"):
        await native.export_snapshot("mine", tmp_path / "no" / "directory")
    with pytest.raises(ImageNotFoundError):
        await native.export_snapshot("never", tmp_path / "x")


async def test_an_image_that_is_not_here_is_named(native: LinuxEngine, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(parcel([], base={"image": "debian:x", "digest": "sha256:" + "0" * 64}))
    with pytest.raises(ImageNotFoundError, match="debian:x"):
        await native.import_snapshot(file, "x")


async def test_nothing_leads_out(native: LinuxEngine, sandbox_on: MakeSandbox, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("as it was")
    hostile = [
        [entry("../../../../../../../../../" + str(victim) + "/new")],
        [entry("link", tarfile.SYMTYPE, str(victim)), entry("link/new", size=3)],
        [entry("link", tarfile.SYMTYPE, "../" * 20 + str(victim)[1:]), entry("link/new", size=3)],
        [entry("hard", tarfile.LNKTYPE, str(victim / "file"))],
        [entry("disk", tarfile.BLKTYPE, devmajor=7, devminor=0)],
        [entry("set", mode=0o6777)],
    ]
    names = []
    for number, entries in enumerate(hostile):
        file = tmp_path / f"{number}"
        file.write_bytes(parcel(entries))
        try:
            await native.import_snapshot(file, f"h{number}")
            names.append(f"h{number}")
        except ImageError:
            pass
    headers: list[dict[str, Any]] = [
        {"removed": ["../../../x"]},
        {"opaque": ["a/../../.."]},
        {"removed": ["a\0b"]},
        {"removed": 7},
        {"base": 1},
    ]
    for number, more in enumerate(headers):
        file = tmp_path / f"m{number}"
        file.write_bytes(parcel([], **more))
        with pytest.raises(SandboxError):
            await native.import_snapshot(file, f"m{number}")
    file = tmp_path / "through"
    file.write_bytes(parcel([entry("link", tarfile.SYMTYPE, str(victim))], removed=["link/file"], opaque=["link"]))
    with pytest.raises(SandboxError):
        await native.import_snapshot(file, "through")
    assert {path.name: path.read_text() for path in victim.iterdir()} == {"file": "as it was"}
    for name in names:
        async with sandbox_on(native, image=f"snapshot:{name}") as sandbox:
            assert (await sandbox.exec("find / -xdev -type b; find / -xdev -perm /6000 -path '/set'")).stdout == ""
    assert len(native.layout.layers.list_saved()) == len(names)


async def test_a_bomb_is_not_unpacked(native: LinuxEngine, tmp_path: Path) -> None:
    file = tmp_path / "bomb"
    file.write_bytes(parcel([entry("zeros", size=200 << 20)]))
    assert file.stat().st_size < 1 << 20
    with pytest.raises(ImageError, match="bomb"):
        await native.import_snapshot(file, "bomb")
    assert native.layout.layers.list_saved() == []


async def test_what_a_file_says_of_its_size_opens_no_limit(
    native: LinuxEngine, sandbox_on: MakeSandbox, tmp_path: Path
) -> None:
    for number, said in enumerate((-(1 << 40), 0)):
        file = tmp_path / f"{number}"
        file.write_bytes(parcel([entry("zeros", size=20 << 20)], size_bytes=said))
        assert (await native.import_snapshot(file, f"s{number}")).size_bytes >= 20 << 20
        async with sandbox_on(native, image=f"snapshot:s{number}", disk="24m") as sandbox:
            assert not (await sandbox.exec("head -c 16m /dev/urandom >more")).success


@pytest.mark.parametrize("header", ["[" * 100_000, '{"format": "atoll-snapshot", "x": "' + "y" * (9 << 20) + '"}'])
async def test_a_header_costs_no_more_than_a_header(native: LinuxEngine, tmp_path: Path, header: str) -> None:
    content = header.encode() + b"\n"
    (tmp_path / "file").write_bytes(content + hashlib.sha256(content).hexdigest().encode() + b"\n")
    with pytest.raises(ImageError, match="is not a snapshot"):
        await native.import_snapshot(tmp_path / "file", "x")
    assert await native.snapshots() == []


@pytest.mark.parametrize("name", ["removed", "opaque"])
async def test_names_in_a_header_count_like_files(
    native: LinuxEngine, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_file, "ImageLimits", functools.partial(ImageLimits, entries=50))
    folders = [entry(f"d{number}", tarfile.DIRTYPE, mode=0o755) for number in range(40)]
    (tmp_path / "file").write_bytes(parcel(folders, **{name: [f"d{number}" for number in range(20)]}))
    with pytest.raises(ImageError, match="more than 50 entries"):
        await native.import_snapshot(tmp_path / "file", "x")
    assert await native.snapshots() == []


async def test_numbers_that_nobody_can_write_down_are_refused(native: LinuxEngine, tmp_path: Path) -> None:
    file = tmp_path / "file"
    for number in ("Infinity", "-Infinity", "NaN", "1e999", "9" * 30):
        for place in ("size_bytes", "created_at", "memory"):
            value: Any = "NUMBER" if place != "memory" else {"version": "x", "files": [["pages.img", "NUMBER"]]}
            head, line, rest = parcel([], **{place: value})[:-65].partition(b"\n")
            content = head.replace(b'"NUMBER"', number.encode()) + line + rest
            file.write_bytes(content + hashlib.sha256(content).hexdigest().encode() + b"\n")
            if place == "created_at" and number == "9" * 30:
                continue  # a number as any other, and nobody asks when a stranger says it was
            with pytest.raises(ImageError):
                await native.import_snapshot(file, "x")
    assert native.layout.layers.list_saved() == []


async def test_a_name_costs_something_though_nothing_is_in_it(native: LinuxEngine, tmp_path: Path) -> None:
    """Be it removed, or an empty file: a limit on bytes is one on names as well."""
    for number, content in enumerate(
        (
            parcel([], removed=[f"n{number}" for number in range(5_000)]),
            parcel([entry(f"n{number}") for number in range(5_000)]),
        )
    ):
        file = tmp_path / f"{number}"
        file.write_bytes(content)
        with pytest.raises(ImageError, match="more than 1,000,000 bytes"):
            await native.import_snapshot(file, f"many{number}", most_bytes=1_000_000)
        made = await native.import_snapshot(file, f"many{number}", most_bytes=10_000_000)
        assert made.size_bytes >= 5_000 * 500
    file.write_bytes(parcel([], removed=["a", "a"]))
    with pytest.raises(ImageError):
        await native.import_snapshot(file, "twice")
