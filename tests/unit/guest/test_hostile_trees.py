"""A tree from a hostile agent never reaches outside of its destination, and leaves nothing half done."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path

import pytest

from atoll.errors import AgentUnreachableError, ProtocolError, SandboxResourceError
from atoll.guest.file_records import DIRECTORY, ERROR, FILE, LINK, encode_record
from atoll.guest.frames import HEADER, MAX_PAYLOAD, WINDOW, FrameType, Op, Tag, encode_frame
from atoll.guest.tree_copy import PartialCopyError, copy_from, copy_to
from unit.guest.conftest import Scripted
from unit.guest.scripted import Peer, eventually

pytestmark = pytest.mark.timeout(60)

TOP = encode_record(DIRECTORY, b"", 0o755, 0, 0)


def _file(path: bytes, content: bytes, mode: int = 0o644, mtime_ns: int = 0) -> bytes:
    return encode_record(FILE, path, mode, len(content), mtime_ns) + content


def _link(path: bytes, target: bytes) -> bytes:
    return encode_record(LINK, path, 0o777, 0, 0, target)


def _directory(path: bytes, mode: int = 0o755) -> bytes:
    return encode_record(DIRECTORY, path, mode, 0, 0)


async def _fetch(scripted: Scripted, tree: bytes, destination: Path, piece: int = MAX_PAYLOAD) -> int:
    async def script(peer: Peer) -> None:
        stream = await peer.opened(Op.GET_TREE)
        for position in range(0, len(tree), piece):
            await peer.data(stream, tree[position : position + piece])
        await peer.end(stream)
        await peer.until_closed()

    return await copy_from(scripted(script).connect, "src", destination, timeout_s=5)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What must not be touched."""
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "secret").write_text("old")
    return directory


@pytest.mark.parametrize(
    "path",
    [b"..", b"../outside/new", b"a/../../outside/new", b"/etc/new", b"a//b", b"./a", b"a/", b"a\0b", b"/", b".", b"/b"],
)
@pytest.mark.parametrize("kind", [FILE, DIRECTORY, LINK])
async def test_a_path_that_leads_elsewhere_is_refused(
    scripted: Scripted, tmp_path: Path, outside: Path, path: bytes, kind: int
) -> None:
    tree = TOP + _directory(b"a") + encode_record(kind, path, 0o644, 0, 0, b"target")
    with pytest.raises(ProtocolError):
        await _fetch(scripted, tree, tmp_path / "dst")
    assert os.listdir(outside) == ["secret"]


@pytest.mark.parametrize("target", [b"../outside", b"OUTSIDE"])
async def test_nothing_is_written_through_a_link(
    scripted: Scripted, tmp_path: Path, outside: Path, target: bytes
) -> None:
    link = _link(b"way", target.replace(b"OUTSIDE", os.fsencode(outside)))
    for tree in (
        TOP + link + _file(b"way/new", b"x"),
        TOP + link + _link(b"way/new", b"x"),
        TOP + link + _directory(b"way/new"),
        TOP + _directory(b"way") + link + _file(b"way/new", b"x"),
        TOP + link + _directory(b"way") + _file(b"way/new", b"x"),
    ):
        with pytest.raises((ProtocolError, OSError)):
            await _fetch(scripted, tree, tmp_path / "dst")
        assert os.listdir(outside) == ["secret"]


async def test_a_file_replaces_a_link_instead_of_following_it(
    scripted: Scripted, tmp_path: Path, outside: Path
) -> None:
    tree = TOP + _link(b"f", os.fsencode(outside / "secret")) + _file(b"f", b"new")
    await _fetch(scripted, tree, tmp_path / "dst")
    assert (outside / "secret").read_text() == "old"
    assert (tmp_path / "dst/f").read_text() == "new"
    assert not (tmp_path / "dst/f").is_symlink()


async def test_a_link_that_was_there_before_is_not_followed(scripted: Scripted, tmp_path: Path, outside: Path) -> None:
    destination = tmp_path / "dst"
    destination.mkdir()
    (destination / "d").symlink_to(outside)
    with pytest.raises(NotADirectoryError, match="is not a directory"):
        await _fetch(scripted, TOP + _directory(b"d") + _file(b"d/secret", b"new"), destination)
    assert (outside / "secret").read_text() == "old"


async def test_links_are_kept_exactly_wherever_they_point(scripted: Scripted, tmp_path: Path) -> None:
    await _fetch(scripted, TOP + _link(b"l", b"/etc/\xff../x"), tmp_path / "dst")
    assert os.readlink(os.fsencode(tmp_path / "dst/l")) == b"/etc/\xff../x"


async def test_no_file_is_made_set_uid(scripted: Scripted, tmp_path: Path) -> None:
    tree = TOP + _file(b"f", b"x", 0o106755) + _directory(b"d", 0o7755)
    await _fetch(scripted, tree, tmp_path / "dst")
    assert stat.S_IMODE((tmp_path / "dst/f").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "dst/d").stat().st_mode) == 0o755
    assert (tmp_path / "dst/f").stat().st_uid == os.getuid()


@pytest.mark.parametrize(
    ("mtime_ns", "expected"), [(-(2**63), 0), (2**63 - 1, 2**32 - 1), (-1, 0), (1_500_000_000, 1.5)]
)
async def test_any_time_is_brought_into_a_range_that_file_systems_know(
    scripted: Scripted, tmp_path: Path, mtime_ns: int, expected: float
) -> None:
    tree = encode_record(DIRECTORY, b"", 0o755, 0, mtime_ns) + _file(b"f", b"x", mtime_ns=mtime_ns)
    await _fetch(scripted, tree, tmp_path / "dst")
    assert (tmp_path / "dst/f").stat().st_mtime == expected
    assert (tmp_path / "dst").stat().st_mtime == expected


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(TOP + _file(b"f", b"12345")[:-1], id="less content than announced"),
        pytest.param(TOP + encode_record(FILE, b"f", 0o644, 2**63, 0) + bytes(1000), id="an absurd size"),
        pytest.param(TOP + _file(b"f", b"x") + b"surplus" * 10, id="more content than announced"),
        pytest.param(TOP + encode_record(FILE, b"f", 0, 0, 0)[:-1], id="half a record"),
        pytest.param(TOP + encode_record(ord("p"), b"p", 0, 0, 0), id="a fifo"),
        pytest.param(TOP + encode_record(ord("c"), b"c", 0o666, 0, 0), id="a device"),
        pytest.param(TOP + TOP, id="the top twice"),
        pytest.param(_file(b"", b"x") + _file(b"", b"x"), id="one file twice"),
        pytest.param(_file(b"", b"x") + _file(b"a", b"x"), id="a file below a file"),
        pytest.param(TOP + _file(b"never/announced", b"x"), id="a directory that was never announced"),
        pytest.param(TOP + _file(b"f", b"") + _file(b"f/g", b"x"), id="a file as a directory"),
        pytest.param(
            TOP + b"".join(_directory(b"/".join([b"d"] * depth)) for depth in range(1, 600)), id="endlessly deep"
        ),
    ],
)
@pytest.mark.parametrize("piece", [MAX_PAYLOAD, 7])
async def test_a_lie_about_a_tree_is_a_violation_and_leaves_no_partial_file(
    scripted: Scripted, tmp_path: Path, tree: bytes, piece: int
) -> None:
    if len(tree) > 100_000:
        piece = MAX_PAYLOAD
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError):
        await _fetch(scripted, tree, tmp_path / "dst", piece)
    for directory, _, files in os.walk(tmp_path / "dst"):
        for name in files:
            assert Path(directory, name).stat().st_size in (0, 1)
    # The script's end of the connection may still be open.
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


async def test_a_directory_may_forbid_writing_once_it_is_filled(scripted: Scripted, tmp_path: Path) -> None:
    tree = TOP + _directory(b"d", 0o500) + _file(b"d/f", b"x") + _directory(b"d/e", 0o500) + _file(b"d/g", b"y")
    assert await _fetch(scripted, tree, tmp_path / "dst") == 5
    assert stat.S_IMODE((tmp_path / "dst/d").stat().st_mode) == 0o500
    assert (tmp_path / "dst/d/g").read_text() == "y"


async def test_what_the_agent_could_not_read_is_told_after_the_rest_was_copied(
    scripted: Scripted, tmp_path: Path
) -> None:
    failed = b"".join(encode_record(ERROR, b"no/%d" % n, 0, errno.EACCES, 0) for n in range(2000))
    tree = TOP + failed + encode_record(ERROR, b"odd", 0, 2**64 - 1, 0) + _file(b"f", b"x")
    with pytest.raises(
        PartialCopyError, match=r"2001 not copied: 'src/no/0': Permission denied, .* and 1996 more"
    ) as it:
        await _fetch(scripted, tree, tmp_path / "dst")
    assert it.value.errno == errno.EACCES
    assert len(it.value.failures) == 1000
    assert (tmp_path / "dst/f").read_text() == "x"


async def test_limits_stop_a_tree_before_it_is_written(scripted: Scripted, tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        stream = await peer.opened(Op.GET_TREE)
        await peer.data(stream, TOP + _file(b"a", b"12345") + _file(b"b", b"12345"))
        await peer.until_closed()

    agent = scripted(script)
    with pytest.raises(SandboxResourceError, match="more than 9 bytes"):
        await copy_from(agent.connect, "src", tmp_path / "1", max_bytes=9)
    with pytest.raises(SandboxResourceError, match="more than 2 items"):
        await copy_from(agent.connect, "src", tmp_path / "2", max_items=2)
    assert not (tmp_path / "1/b").exists()


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(HEADER.pack(MAX_PAYLOAD + 1, 1, FrameType.DATA, 0, 0), id="too large"),
        pytest.param(encode_frame(FrameType.DATA, 2, b"x"), id="another stream"),
        pytest.param(encode_frame(FrameType.DATA, 1, b"x", channel=1), id="another channel"),
        pytest.param(encode_frame(FrameType.OPEN, 1), id="another direction"),
        pytest.param(encode_frame(FrameType.EVENT, 1, b"\1\0"), id="an event"),
        pytest.param(encode_frame(FrameType.END, 1, b"\1"), id="truncated fields"),
        pytest.param(encode_frame(FrameType.ERROR, 0), id="a refusal of the connection"),
    ],
)
async def test_a_frame_against_the_protocol_ends_a_copy(scripted: Scripted, tmp_path: Path, frame: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.expect(FrameType.OPEN)
        await peer.send(frame)
        await peer.until_closed()

    agent = scripted(script)
    with pytest.raises(ProtocolError):
        await copy_from(agent.connect, "src", tmp_path / "dst", timeout_s=5)
    (tmp_path / "big").write_bytes(bytes(2 * WINDOW))
    with pytest.raises(ProtocolError):
        await copy_to(agent.connect, tmp_path / "big", "dst/", timeout_s=5)


async def test_an_agent_that_stops_is_given_up(scripted: Scripted, tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        frame = await peer.expect(FrameType.OPEN)
        if frame.payload[:1] == bytes([Op.GET_TREE]):
            await peer.data(frame.stream, TOP + encode_record(FILE, b"f", 0o644, 5, 0) + b"12")
        await asyncio.sleep(60)

    agent = scripted(script)
    with pytest.raises(AgentUnreachableError, match=r"no progress for 0\.2 s"):
        await copy_from(agent.connect, "src", tmp_path / "dst", timeout_s=0.2)
    assert os.listdir(tmp_path / "dst") == []
    (tmp_path / "big").write_bytes(bytes(8 * WINDOW))
    with pytest.raises(AgentUnreachableError, match=r"no progress for 0\.2 s"):
        await copy_to(agent.connect, tmp_path / "big", "dst/", timeout_s=0.2)


async def test_a_connection_that_is_cut_ends_a_copy(scripted: Scripted, tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        stream = await peer.opened(Op.GET_TREE)
        await peer.data(stream, TOP + encode_record(FILE, b"f", 0o644, 5, 0) + b"12")

    with pytest.raises(AgentUnreachableError, match="closed the connection"):
        await copy_from(scripted(script).connect, "src", tmp_path / "dst")
    assert os.listdir(tmp_path / "dst") == []


async def test_cancelling_ends_the_thread_and_removes_the_partial_file(scripted: Scripted, tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def script(peer: Peer) -> None:
        stream = await peer.opened(Op.GET_TREE)
        await peer.data(stream, TOP + encode_record(FILE, b"f", 0o644, 5, 0) + b"12")
        begun.set()
        await peer.until_closed()

    task = asyncio.create_task(copy_from(scripted(script).connect, "src", tmp_path / "dst"))
    await begun.wait()
    await eventually((tmp_path / "dst/f").exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.listdir(tmp_path / "dst") == []


async def test_an_upload_that_is_refused_ends_with_the_reason(scripted: Scripted, tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        await peer.error(await peer.opened(Op.PUT_TREE), errno.ENOSPC, "disk is full")
        await peer.until_closed()

    (tmp_path / "many").mkdir()
    for number in range(30):
        (tmp_path / f"many/{number}").write_bytes(bytes(30_000))
    (tmp_path / "many/big").write_bytes(bytes(8 * WINDOW))
    for name, target in (("many", "dst/"), ("many/big", "dst/big")):
        with pytest.raises(OSError, match=f"disk is full: '{target}'"):
            await copy_to(scripted(script).connect, tmp_path / name, "dst/", timeout_s=5)


async def test_an_agent_that_claims_another_number_of_files_is_refused(scripted: Scripted, tmp_path: Path) -> None:
    async def script(peer: Peer) -> None:
        stream = await peer.opened(Op.PUT_TREE)
        await peer.end(stream, [(Tag.SIZE, 2)])
        await peer.until_closed()

    (tmp_path / "f").write_bytes(b"x")
    with pytest.raises(ProtocolError, match="as many files"):
        await copy_to(scripted(script).connect, tmp_path / "f", "dst/")


async def test_a_file_that_shrinks_while_it_is_sent_is_filled_up_and_told(scripted: Scripted, tmp_path: Path) -> None:
    received = bytearray()

    async def script(peer: Peer) -> None:
        stream = await peer.opened(Op.PUT_TREE)
        while (frame := await peer.frame()).type == FrameType.DATA:
            if not received:
                os.truncate(tmp_path / "src/big", 100_000)
            received.extend(frame.payload)
            await peer.credit(stream, len(frame.payload))
        await peer.end(stream, [(Tag.SIZE, 2)])
        await peer.until_closed()

    (tmp_path / "src").mkdir()
    (tmp_path / "src/big").write_bytes(b"x" * 4 * WINDOW)
    with pytest.raises(PartialCopyError, match="'big': Input/output error"):
        await copy_to(scripted(script).connect, tmp_path / "src", "dst")
    content = received[2 * 36 + len("big") :]
    assert len(content) == 4 * WINDOW
    assert content[:100_000] == b"x" * 100_000
    assert content[-1] == 0
