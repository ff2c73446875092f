"""Trees between the host and the real agent, and what is kept of them."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path

import pytest

from atoll.guest.tree_copy import PartialCopyError, copy_from, copy_to
from deep_trees import make_deep
from unit.guest.conftest import RealAgent
from unit.guest.scripted import eventually

pytestmark = pytest.mark.timeout(30)


def _make_tree(top: Path) -> None:
    (top / "empty").mkdir(parents=True)
    (top / "deep/er/est").mkdir(parents=True)
    (top / "deep/er/est/f").write_bytes(b"deep")
    (top / "none").write_bytes(b"")
    (top / "large").write_bytes(os.urandom(1_000_003))
    for number in range(500):
        (top / f"deep/{number}").write_bytes(os.urandom(number * 7))
    Path(os.fsdecode(os.fsencode(top) + b"/\xff\xfe \n")).write_text("odd name")
    (top / "run").write_text("#!/bin/sh\n")
    (top / "run").chmod(0o755)
    (top / "link").symlink_to("deep/er")
    (top / "broken").symlink_to("/no/such\udcff")
    (top / "locked").mkdir()
    (top / "locked/f").write_text("x")
    (top / "locked").chmod(0o555)
    for directory, _, files in os.walk(top, topdown=False):
        for name in [*files, "."]:
            path = os.path.join(directory, name)
            os.utime(path, ns=(0, 1_234_567_890_123_456_789), follow_symlinks=False)


def _describe(top: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for directory, names, files in os.walk(top):
        for name in [*names, *files, "."]:
            path = os.path.join(directory, name)
            info = os.lstat(path)
            content: object = None
            if stat.S_ISREG(info.st_mode):
                content = Path(path).read_bytes()
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            time = None if stat.S_ISLNK(info.st_mode) else info.st_mtime_ns
            found[os.path.normpath(os.path.relpath(path, top))] = (info.st_mode, time, content)
    return found


async def test_a_tree_survives_the_way_there_and_back(agent: RealAgent, tmp_path: Path) -> None:
    _make_tree(tmp_path / "src")
    expected = _describe(tmp_path / "src")
    items = await copy_to(agent.connect, tmp_path / "src", "made/dst")
    assert _describe(agent.root / "made/dst") == expected
    assert await copy_from(agent.connect, "made/dst", tmp_path / "parents/back") == items
    assert _describe(tmp_path / "parents/back") == expected
    # Once more over what is there: the same result, and nothing is left from replacing.
    (tmp_path / "src/locked").chmod(0o755)
    await copy_to(agent.connect, tmp_path / "src", "made/dst")
    await copy_from(agent.connect, "made/dst", tmp_path / "parents/back")
    assert _describe(tmp_path / "parents/back").keys() == expected.keys()


async def test_a_file_goes_where_it_is_told(agent: RealAgent, tmp_path: Path) -> None:
    source = tmp_path / "f.txt"
    source.write_text("content")
    (agent.root / "dir").mkdir()
    await copy_to(agent.connect, source, "new/name")
    await copy_to(agent.connect, source, "dir")
    await copy_to(agent.connect, source, "other/")
    await copy_to(agent.connect, source, "rel", work_dir=str(agent.root / "dir"))
    for path in ("new/name", "dir/f.txt", "other/f.txt", "dir/rel"):
        assert (agent.root / path).read_text() == "content"

    (tmp_path / "dir").mkdir()
    await copy_from(agent.connect, "new/name", tmp_path / "made/here")
    await copy_from(agent.connect, "new/name", tmp_path / "dir")
    await copy_from(agent.connect, "new/name", f"{tmp_path}/other/")
    await copy_from(agent.connect, "rel", tmp_path / "rel", work_dir=str(agent.root / "dir"))
    for path in ("made/here", "dir/name", "other/name", "rel"):
        assert (tmp_path / path).read_text() == "content"


async def test_the_start_may_be_a_link_but_nothing_below_is_followed(agent: RealAgent, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/out").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to("real")
    await copy_to(agent.connect, tmp_path / "link", "dst")
    assert os.listdir(agent.root / "dst") == ["out"]
    assert os.readlink(agent.root / "dst/out") == str(tmp_path)
    (agent.root / "start").symlink_to("dst")
    await copy_from(agent.connect, "start", tmp_path / "back")
    assert os.listdir(tmp_path / "back") == ["out"]


async def test_what_is_no_file_is_left_out_and_told(agent: RealAgent, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/f").write_text("x")
    os.mkfifo(tmp_path / "src/fifo")
    with pytest.raises(PartialCopyError, match="1 not copied: 'fifo': Invalid argument") as caught:
        await copy_to(agent.connect, tmp_path / "src", "dst")
    assert caught.value.failures == [("fifo", errno.EINVAL)]
    assert os.listdir(agent.root / "dst") == ["f"]
    os.mkfifo(agent.root / "dst/fifo")
    with pytest.raises(PartialCopyError, match="1 not copied: 'dst/fifo': Invalid argument"):
        await copy_from(agent.connect, "dst", tmp_path / "back")
    assert os.listdir(tmp_path / "back") == ["f"]


async def test_what_does_not_exist_is_told_with_its_path(agent: RealAgent, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        await copy_to(agent.connect, tmp_path / "nothing", "dst")
    with pytest.raises(FileNotFoundError, match="nothing"):
        await copy_from(agent.connect, "nothing", tmp_path / "dst")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="fifo"):
        await copy_to(agent.connect, tmp_path / "fifo", "dst")
    assert os.listdir(agent.root) == []


async def test_set_uid_is_not_copied_in_either_direction(agent: RealAgent, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    (tmp_path / "f").chmod(0o6755)
    await copy_to(agent.connect, tmp_path / "f", "f")
    assert stat.S_IMODE((agent.root / "f").stat().st_mode) == 0o755
    (agent.root / "f").chmod(0o6755)
    await copy_from(agent.connect, "f", tmp_path / "g")
    assert stat.S_IMODE((tmp_path / "g").stat().st_mode) == 0o755


async def test_a_large_file_is_the_same_on_both_sides(agent: RealAgent, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 40 + b"end"
    (tmp_path / "big").write_bytes(data)
    await copy_to(agent.connect, tmp_path / "big", "big")
    await copy_from(agent.connect, "big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data


async def test_cancelling_an_upload_leaves_no_partial_file(agent: RealAgent, tmp_path: Path) -> None:
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 20 << 30)
    task = asyncio.create_task(copy_to(agent.connect, tmp_path / "huge", "sub/huge"))
    target = agent.root / "sub"
    await eventually(lambda: target.is_dir() and os.listdir(target))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: not os.listdir(target))


@pytest.mark.usefixtures("few_descriptors")
async def test_a_deep_tree_takes_few_descriptors_either_way(agent: RealAgent, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    make_deep(tmp_path / "src", 500)
    await copy_to(agent.connect, tmp_path / "src", "deep")
    await copy_from(agent.connect, "deep", tmp_path / "back")
    assert len(_describe(tmp_path / "back")) == 501
    make_deep(tmp_path / "src" / "/".join(["d"] * 500), 100)
    with pytest.raises(PartialCopyError, match="too long"):
        await copy_to(agent.connect, tmp_path / "src", "deeper")
