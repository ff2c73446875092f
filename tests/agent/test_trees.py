"""Trees: what PUT_TREE refuses, and what GET_TREE makes of files that change while they are read."""

from __future__ import annotations

import errno
import os
import stat
import struct

import pytest

from agent.client import RECORD, Answer, Connection, Record, eventually, parse_records
from agent.conftest import Agent
from atoll.guest.frames import WINDOW, FrameType, Op, Tag

ROOT = Record("d", b"", mode=0o755)


def file(path: bytes, content: bytes = b"", mode: int = 0o644, mtime_ns: int = 0) -> Record:
    return Record("f", path, b"", mode, len(content), mtime_ns, content)


def put(host: Connection, *items: Record | bytes, path: str = "t", flags: int = 0) -> Answer:
    data = b"".join(item if isinstance(item, bytes) else item.encode() for item in items)
    return host.call(Op.PUT_TREE, [(Tag.PATH, path), (Tag.FLAGS, flags)], data)


def everything(agent: Agent) -> set[str]:
    return {os.path.relpath(os.path.join(at, name), agent.root) for at, d, f in os.walk(agent.root) for name in d + f}


def head(kind: str, path: int, target: int = 0, size: int = 0) -> bytes:
    return RECORD.pack(ord(kind), 0, path, target, 0, 0o644, 0, 0, size, 0)


# --- coming in


def test_a_tree_comes_in_as_it_is(agent: Agent, host: Connection) -> None:
    answer = put(
        host,
        Record("d", b"", mode=0o750, mtime_ns=5_000_000_001),
        Record("d", b"closed", mode=0o555),
        file(b"closed/f", b"content", mode=0o4751, mtime_ns=-1),
        Record("l", b"link", b"closed/f"),
        file(b"empty"),
        file(b"big", bytes(1_000_000)),
    )
    assert answer.end.int(Tag.SIZE) == 6
    top = agent.root / "t"
    assert (stat.S_IMODE(top.stat().st_mode), top.stat().st_mtime_ns) == (0o750, 5_000_000_001)
    assert stat.S_IMODE((top / "closed").stat().st_mode) == 0o555
    inner = (top / "closed" / "f").stat()
    assert (stat.S_IMODE(inner.st_mode), inner.st_mtime_ns) == (0o4751, -1)
    assert os.readlink(top / "link") == "closed/f"
    assert (top / "big").stat().st_size == 1_000_000
    assert (top / "empty").read_bytes() == b""


def test_a_tree_may_be_one_file_or_one_link(agent: Agent, host: Connection) -> None:
    assert put(host, file(b"", b"alone"), path="a/b", flags=1).end.int(Tag.SIZE) == 1
    assert (agent.root / "a" / "b").read_bytes() == b"alone"
    assert put(host, Record("l", b"", b"b"), path="a/c").end is not None
    assert os.readlink(agent.root / "a" / "c") == "b"
    for single in (file(b"", b"x"), Record("l", b"", b".")):
        assert put(host, single, file(b"more"), path="a/b").errno == errno.EINVAL  # it would lie beside it
    assert everything(agent) == {"a", "a/b", "a/c"}
    assert put(host, file(b""), path="no/parent").errno == errno.ENOENT


ELSEWHERE = [b"/etc/x", b"..", b"../x", b"a/../x", b"a/..", b".", b"./x", b"a/./x", b"a//x", b"a/", b"//", b"", b"x\0y"]


@pytest.mark.parametrize("kind", ["f", "d", "l"])
def test_paths_that_lead_elsewhere_are_refused(agent: Agent, host: Connection, kind: str) -> None:
    target = b"anything" if kind == "l" else b""
    for path in ELSEWHERE:
        answer = put(host, ROOT, Record("d", b"a", mode=0o755), Record(kind, path, target))
        assert answer.errno == errno.EINVAL, path
        assert everything(agent) == {"t", "t/a"}, path


def test_the_first_item_is_the_tree_itself(agent: Agent, host: Connection) -> None:
    for first in (b"x", b"a/b", b"/", b".."):
        assert put(host, Record("d", first)).errno == errno.EINVAL
    assert everything(agent) == set()


def test_other_kinds_are_refused(agent: Agent, host: Connection) -> None:
    for kind in "pscb!\0\xff":
        assert put(host, ROOT, Record(kind, b"x")).errno == errno.EINVAL
        assert everything(agent) == {"t"}


def test_names_that_are_too_long(agent: Agent, host: Connection) -> None:
    assert put(host, ROOT, head("f", 0xFFFF) + b"x" * 70_000).errno == errno.ENAMETOOLONG
    assert put(host, ROOT, head("l", 1, 0xFFFF) + b"x" * 70_000).errno == errno.ENAMETOOLONG
    assert put(host, ROOT, head("f", 4096) + b"x" * 4096).errno == errno.ENAMETOOLONG
    assert put(host, ROOT, head("f", 256) + b"x" * 256).errno == errno.ENAMETOOLONG
    assert put(host, ROOT, head("f", 4095) + (b"d/" * 2048)[:4095]).errno in (errno.ENOENT, errno.EINVAL)
    assert put(host, ROOT, head("l", 1, 4095) + b"x" + b"y" * 4095).end is not None
    assert everything(agent) == {"t", "t/x"}


def test_a_file_that_is_shorter_than_it_says_leaves_nothing(agent: Agent, host: Connection) -> None:
    """However much it announces: nothing is allocated for what has not come."""
    for size in (1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        answer = put(host, ROOT, head("f", 1, size=size) + b"x" + (b"some" if size > 4 else b""))
        assert answer.errno == errno.EINVAL
        assert everything(agent) == {"t"}


def test_a_tree_that_stops_at_any_byte_is_refused(agent: Agent, host: Connection) -> None:
    whole = ROOT.encode() + file(b"f", b"content").encode() + Record("l", b"l", b"target").encode()
    ends = {len(ROOT.encode()), len(ROOT.encode() + file(b"f", b"content").encode()), len(whole)}
    for length in range(len(whole) + 1):
        answer = put(host, whole[:length], path=f"t{length}")
        assert (answer.last.type is FrameType.END) == (length in ends)
    assert not [path for path in everything(agent) if ".atoll-" in path]


def test_items_may_come_byte_by_byte(agent: Agent, host: Connection) -> None:
    stream = host.open(Op.PUT_TREE, [(Tag.PATH, "t")])
    for byte in ROOT.encode() + file(b"f", b"content").encode() + file(b"g").encode():
        host.data(stream, bytes([byte]))
    host.end(stream)
    assert host.finish(stream).end.int(Tag.SIZE) == 3
    assert (agent.root / "t" / "f").read_bytes() == b"content"


def test_nothing_is_written_through_a_link_of_the_same_tree(agent: Agent, host: Connection) -> None:
    outside = agent.root / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"precious")
    for link, item in (
        (b"../outside", file(b"l/f", b"evil")),
        (b"../outside", Record("d", b"l/new")),
        (b"../outside", Record("l", b"l/new", b"x")),
        (b"../outside", Record("d", b"l")),
    ):
        answer = put(host, ROOT, Record("l", b"l", link), item)
        assert answer.errno in (errno.ENOTDIR, errno.ELOOP)
    assert put(host, ROOT, Record("l", b"l", b"../outside/f"), file(b"l", b"mine")).end is not None
    assert (agent.root / "t" / "l").read_bytes() == b"mine"  # in the place of the link
    assert not (agent.root / "t" / "l").is_symlink()
    assert (os.listdir(outside), (outside / "f").read_bytes()) == (["f"], b"precious")


def test_nothing_is_written_through_a_link_that_was_there(agent: Agent, host: Connection) -> None:
    outside, top = agent.root / "outside", agent.root / "t"
    outside.mkdir()
    top.mkdir()
    (outside / "f").write_bytes(b"precious")
    (top / "l").symlink_to(outside)
    (top / "f").symlink_to(outside / "f")
    assert put(host, ROOT, file(b"l/f", b"evil")).errno in (errno.ENOTDIR, errno.ELOOP)
    assert put(host, ROOT, file(b"f", b"new")).end is not None
    assert (top / "f").read_bytes() == b"new"
    assert (outside / "f").read_bytes() == b"precious"


def test_a_link_put_in_the_way_meanwhile_is_not_followed(agent: Agent, host: Connection) -> None:
    """Also the modes of directories, which are set last, do not reach through one."""
    outside = agent.root / "outside"
    outside.mkdir(mode=0o700)
    stream = host.open(Op.PUT_TREE, [(Tag.PATH, "t")])
    host.data(stream, ROOT.encode() + Record("d", b"d", mode=0o777).encode())
    host.hello()
    (agent.root / "t" / "d").rmdir()
    (agent.root / "t" / "d").symlink_to(outside)
    host.end(stream)
    assert host.finish(stream).errno in (errno.ENOTDIR, errno.ELOOP)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o700


def test_files_replace_files_and_never_directories(agent: Agent, host: Connection) -> None:
    (agent.root / "t" / "d").mkdir(parents=True)
    (agent.root / "t" / "f").write_bytes(b"old")
    before = (agent.root / "t" / "f").stat().st_ino
    assert put(host, ROOT, file(b"f", b"new")).end is not None
    assert (agent.root / "t" / "f").stat().st_ino != before
    assert put(host, ROOT, file(b"d", b"x")).errno == errno.EISDIR
    assert put(host, ROOT, Record("d", b"f")).errno == errno.ENOTDIR
    assert put(host, ROOT, Record("l", b"d", b"x")).errno in (errno.EISDIR, errno.EPERM)
    assert put(host, ROOT, file(b"f/x", b"")).errno == errno.ENOTDIR


def test_an_interrupted_tree_leaves_no_half_file(agent: Agent) -> None:
    (agent.root / "t").mkdir()
    (agent.root / "t" / "f").write_bytes(b"old")
    with agent.connect() as host:
        stream = host.open(Op.PUT_TREE, [(Tag.PATH, "t")])
        host.data(stream, ROOT.encode() + head("f", 1, size=100) + b"f" + b"half")
        host.hello()
    eventually(lambda: os.listdir(agent.root / "t") == ["f"])
    assert (agent.root / "t" / "f").read_bytes() == b"old"


# --- going out


def get(host: Connection, path: str) -> list[Record]:
    return parse_records(host.call(Op.GET_TREE, [(Tag.PATH, path)]).body, contents=True)


def test_a_tree_goes_out_and_comes_back(agent: Agent, host: Connection) -> None:
    top = agent.root / "t"
    (top / "d" / "e").mkdir(parents=True)
    (top / "d" / "f").write_bytes(os.urandom(300_000))
    (top / "l").symlink_to("nowhere")
    os.mkfifo(top / "fifo")
    body = host.call(Op.GET_TREE, [(Tag.PATH, "t")]).body
    records = {record.path: record for record in parse_records(body, contents=True)}
    assert {path: record.kind for path, record in records.items()} == {
        b"": "d",
        b"d": "d",
        b"d/e": "d",
        b"d/f": "f",
        b"l": "l",
        b"fifo": "!",
    }
    assert records[b"fifo"].size == errno.EINVAL
    assert records[b"d/f"].content == (top / "d" / "f").read_bytes()
    assert put(host, *(record for record in parse_records(body, True) if record.kind != "!"), path="u").end is not None
    assert (agent.root / "u" / "d" / "f").read_bytes() == (top / "d" / "f").read_bytes()
    assert [record.path for record in get(host, "t/d/f")] == [b""]


@pytest.mark.parametrize("change", ["shrinks", "grows", "vanishes"])
def test_a_file_that_changes_while_it_is_sent(agent: Agent, change: str) -> None:
    top, size = agent.root / "t", 2_000_000
    top.mkdir()
    (top / "f").write_bytes(b"x" * size)
    host = agent.connect(grant=False)
    stream = host.open(Op.GET_TREE, [(Tag.PATH, "t")])
    body = bytearray()
    while len(body) < WINDOW:
        body += host.next(stream).payload
    if change == "shrinks":
        os.truncate(top / "f", 1000)
    elif change == "grows":
        with (top / "f").open("ab") as more:
            more.write(b"y" * size)
    else:
        (top / "f").unlink()
    host.grant = True
    host.give_credit(stream, WINDOW)
    body += host.finish(stream).body
    records = parse_records(bytes(body), contents=True)
    assert [record.kind for record in records[:2]] == ["d", "f"]
    content = records[1].content
    assert len(content) == size
    if change == "shrinks":
        assert content.rstrip(b"\0") == b"x" * len(content.rstrip(b"\0"))
        assert content.endswith(b"\0" * 1000)
        assert [(record.kind, record.path, record.size) for record in records[2:]] == [("!", b"f", errno.EIO)]
    else:
        assert content == b"x" * size
        assert records[2:] == []


def test_files_without_a_size_are_told_so(host: Connection) -> None:
    """Those of /proc say 0: nothing more is sent than was said."""
    (record,) = get(host, "/proc/version")
    assert (record.kind, record.size, record.content) == ("f", 0, b"")


def test_walking_is_bounded(agent: Agent, host: Connection) -> None:
    for n in range(50):
        (agent.root / f"d{n}" / "e").mkdir(parents=True)
    records = parse_records(host.call(Op.WALK, [(Tag.PATH, "."), (Tag.LENGTH, 70)]).body)
    assert len(records) == 70
    seen = {record.path for record in parse_records(host.call(Op.WALK, [(Tag.PATH, ".")]).body)}
    assert len(seen) == 100
    assert host.call(Op.WALK, [(Tag.PATH, "nothing")]).errno == errno.ENOENT


def test_a_tree_too_deep_to_be_named_is_an_error_inside_it(agent: Agent, host: Connection) -> None:
    make = "import os\nfor i in range(50): os.mkdir('d' * 200); os.chdir('d' * 200)"
    assert host.run("a", "python3", "-c", make).exit_code == 0
    records = get(host, ".")
    assert [record.kind for record in records].count("d") == 21
    assert (records[-1].kind, records[-1].size) == ("!", errno.ENAMETOOLONG)
    assert host.call(Op.REMOVE, [(Tag.PATH, "d" * 200), (Tag.FLAGS, 1)]).end is not None


def test_record_of_another_size_would_be_noticed() -> None:
    assert RECORD.size == struct.calcsize("<BBHHHIIIQq") == 36
