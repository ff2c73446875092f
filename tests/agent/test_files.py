"""Files: the small requests, reading, writing and removing."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading

import pytest

from agent.client import Connection, eventually, parse_records
from agent.conftest import Agent
from atoll.guest.frames import EventKind, FrameType, Op, Tag
from needs import needs

PARENTS, IN_PLACE, EXCLUSIVE, APPEND = 1, 2, 4, 8
needs_root = needs("root")


def leftovers(agent: Agent) -> list[str]:
    return [name for _, _, names in os.walk(agent.root) for name in names if name.startswith(".atoll-")]


# --- small requests


def test_stat(agent: Agent, host: Connection) -> None:
    (agent.root / "f").write_bytes(b"12345")
    (agent.root / "f").chmod(0o640)
    os.utime(agent.root / "f", ns=(0, -1_500_000_000))
    (agent.root / "l").symlink_to("f")
    end = host.call(Op.STAT, [(Tag.PATH, "f")]).end
    assert (end.bytes(Tag.KIND), end.int(Tag.MODE), end.int(Tag.SIZE)) == (b"f", 0o640, 5)
    assert end.int(Tag.MTIME_NS) == -1_500_000_000
    link = host.call(Op.STAT, [(Tag.PATH, "l")]).end
    assert (link.bytes(Tag.KIND), link.bytes(Tag.TARGET)) == (b"l", b"f")
    assert host.call(Op.STAT, [(Tag.PATH, "l"), (Tag.FLAGS, 1)]).end.bytes(Tag.KIND) == b"f"
    missing = host.call(Op.STAT, [(Tag.PATH, "none")])
    assert missing.errno == errno.ENOENT
    assert b"none" in missing.last.fields.bytes(Tag.MESSAGE)


def test_times_that_cannot_be_told_are_clamped(agent: Agent, host: Connection) -> None:
    shared = f"/dev/shm/atoll-test-{os.getpid()}"  # tmpfs holds any time
    try:
        with open(shared, "wb"):
            pass
        for seconds in (1 << 40, -(1 << 40)):
            os.utime(shared, (0, seconds))
            told = host.call(Op.STAT, [(Tag.PATH, shared)]).end.int(Tag.MTIME_NS)
            assert (told > 0) == (seconds > 0)
            assert abs(told) > 9 * 10**18
    finally:
        os.unlink(shared)


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_paths_that_are_no_paths(host: Connection, path: str) -> None:
    for op in (Op.STAT, Op.READ, Op.WRITE, Op.LIST, Op.REMOVE, Op.PUT_TREE, Op.WATCH, Op.MKDIR):
        assert host.call(op, [(Tag.PATH, path)]).errno == errno.EINVAL
    assert host.call(Op.STAT).errno == errno.EINVAL


def test_long_paths(host: Connection) -> None:
    fits = "/" + "./" * 2046 + "."
    longest = "/" + "/" * 4094
    assert len(longest) == 4095
    assert host.call(Op.STAT, [(Tag.PATH, fits)]).end.bytes(Tag.KIND) == b"d"
    assert host.call(Op.STAT, [(Tag.PATH, longest)]).end.bytes(Tag.KIND) == b"d"
    for op in (Op.STAT, Op.READ, Op.WRITE, Op.LIST, Op.REMOVE, Op.PUT_TREE, Op.WATCH, Op.MKDIR, Op.CONNECT):
        assert host.call(op, [(Tag.PATH, longest + "/")]).errno == errno.ENAMETOOLONG
        assert host.call(op, [(Tag.PATH, "x" * 4090)]).errno in (errno.ENAMETOOLONG, errno.ENOENT)


def test_relative_paths(agent: Agent, host: Connection) -> None:
    (agent.root / "d").mkdir()
    (agent.root / "d" / "f").write_text("")
    assert host.call(Op.STAT, [(Tag.PATH, "d/f")]).end is not None
    assert host.call(Op.STAT, [(Tag.PATH, "f"), (Tag.CWD, str(agent.root / "d"))]).end is not None
    assert host.call(Op.STAT, [(Tag.PATH, "f"), (Tag.CWD, "d")]).errno == errno.EINVAL


def test_directories_and_names(agent: Agent, host: Connection) -> None:
    assert host.call(Op.MKDIR, [(Tag.PATH, "a/b")]).errno == errno.ENOENT
    assert host.call(Op.MKDIR, [(Tag.PATH, "a/b"), (Tag.FLAGS, 1), (Tag.MODE, 0o2777)]).end is not None
    assert stat.S_IMODE((agent.root / "a" / "b").stat().st_mode) == 0o2777
    assert host.call(Op.MKDIR, [(Tag.PATH, "a/b"), (Tag.FLAGS, 1)]).end is not None
    assert host.call(Op.MKDIR, [(Tag.PATH, "a/b")]).errno == errno.EEXIST
    assert host.call(Op.RENAME, [(Tag.PATH, "a/b"), (Tag.TARGET, "c/d")]).errno == errno.ENOENT
    assert host.call(Op.RENAME, [(Tag.PATH, "a/b"), (Tag.TARGET, "c/d"), (Tag.FLAGS, 1)]).end is not None
    assert (agent.root / "c" / "d").is_dir()
    assert host.call(Op.RENAME, [(Tag.PATH, "a/b")]).errno == errno.EINVAL
    assert host.call(Op.SYMLINK, [(Tag.PATH, "l"), (Tag.TARGET, "anything at all")]).end is not None
    assert os.readlink(agent.root / "l") == "anything at all"
    assert host.call(Op.SYMLINK, [(Tag.PATH, "l2")]).errno == errno.ENOENT
    assert host.call(Op.CHMOD, [(Tag.PATH, "c"), (Tag.MODE, 0o711)]).end is not None
    assert stat.S_IMODE((agent.root / "c").stat().st_mode) == 0o711


@needs_root
def test_owners(agent: Agent, host: Connection) -> None:
    (agent.root / "f").write_text("")
    (agent.root / "l").symlink_to("f")
    assert host.call(Op.CHOWN, [(Tag.PATH, "l"), (Tag.UID, 12), (Tag.GID, 34)]).end is not None
    assert ((agent.root / "l").lstat().st_uid, (agent.root / "f").stat().st_uid) == (12, 0)
    assert host.call(Op.CHOWN, [(Tag.PATH, "l"), (Tag.GID, 35)]).end is not None
    assert ((agent.root / "l").lstat().st_uid, (agent.root / "l").lstat().st_gid) == (12, 35)
    assert host.call(Op.CHOWN, [(Tag.PATH, "l"), (Tag.UID, 1 << 32)]).errno == errno.EINVAL


# --- reading


def test_reading(agent: Agent, host: Connection) -> None:
    data = os.urandom(3_000_001)
    (agent.root / "f").write_bytes(data)
    whole = host.call(Op.READ, [(Tag.PATH, "f")])
    assert whole.body == data
    assert whole.event(EventKind.FILE).int(Tag.SIZE) == len(data)
    part: list[tuple[Tag, int | bytes | str]] = [(Tag.PATH, "f"), (Tag.OFFSET, 1_000_000), (Tag.LENGTH, 5)]
    assert host.call(Op.READ, part).body == data[1_000_000:1_000_005]
    assert host.call(Op.READ, [(Tag.PATH, "f"), (Tag.OFFSET, 1 << 40)]).body == b""
    assert host.call(Op.READ, [(Tag.PATH, "f"), (Tag.LENGTH, 0)]).body == b""
    assert host.call(Op.READ, [(Tag.PATH, "f"), (Tag.OFFSET, (1 << 64) - 1)]).errno == errno.EINVAL


def test_files_whose_size_is_not_known_are_read_to_their_end(host: Connection) -> None:
    assert b"Linux" in host.call(Op.READ, [(Tag.PATH, "/proc/version")]).body


def special_files(agent: Agent) -> list[str]:
    os.mkfifo(agent.root / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(agent.root / "socket"))
    return [str(agent.root / "fifo"), str(agent.root / "socket"), "/dev/null", "/dev/zero", "/dev/tty", "/dev/ptmx"]


def test_special_files_are_neither_read_nor_written(agent: Agent, host: Connection) -> None:
    for path in special_files(agent):
        assert host.call(Op.READ, [(Tag.PATH, path)]).errno == errno.EINVAL
        for flags in (0, IN_PLACE, APPEND):
            assert host.call(Op.WRITE, [(Tag.PATH, path), (Tag.FLAGS, flags)], b"x").errno == errno.EINVAL
    for op in (Op.READ, Op.WRITE):
        assert host.call(op, [(Tag.PATH, ".")]).errno == errno.EISDIR


def test_a_fifo_is_not_even_opened(agent: Agent, host: Connection) -> None:
    """Its reader would see an end that is none."""
    os.mkfifo(agent.root / "fifo")
    seen: list[bytes] = []

    def read() -> None:
        with (agent.root / "fifo").open("rb") as fifo:
            seen.append(fifo.read())

    reader = threading.Thread(target=read)
    reader.start()
    for flags in (0, IN_PLACE, APPEND):
        assert host.call(Op.WRITE, [(Tag.PATH, "fifo"), (Tag.FLAGS, flags)], b"x").errno == errno.EINVAL
    assert seen == []
    (agent.root / "fifo").write_bytes(b"real")
    reader.join()
    assert seen == [b"real"]


# --- writing


def write(host: Connection, path: str, data: bytes, **more: int) -> int:
    return host.call(Op.WRITE, [(Tag.PATH, path), *((Tag[k.upper()], v) for k, v in more.items())], data).end.int(
        Tag.SIZE
    )


def test_writing(agent: Agent, host: Connection) -> None:
    data = os.urandom(3_000_001)
    assert write(host, "f", data) == len(data)
    assert (agent.root / "f").read_bytes() == data
    assert stat.S_IMODE((agent.root / "f").stat().st_mode) == 0o644
    (agent.root / "f").chmod(0o751)
    assert write(host, "f", b"new") == 3
    assert stat.S_IMODE((agent.root / "f").stat().st_mode) == 0o751
    write(host, "f", b"new", mode=0o600)
    assert stat.S_IMODE((agent.root / "f").stat().st_mode) == 0o600
    assert write(host, "a/b/c", b"", flags=PARENTS) == 0
    assert host.call(Op.WRITE, [(Tag.PATH, "x/y")], b"").errno == errno.ENOENT
    assert leftovers(agent) == []


def test_writing_in_place_and_appending(agent: Agent, host: Connection) -> None:
    (agent.root / "f").write_bytes(b"0123456789")
    number = (agent.root / "f").stat().st_ino
    write(host, "f", b"ab", flags=IN_PLACE, offset=3)
    assert (agent.root / "f").read_bytes() == b"012ab56789"
    write(host, "f", b"!", flags=APPEND)
    assert (agent.root / "f").read_bytes() == b"012ab56789!"
    assert (agent.root / "f").stat().st_ino == number
    write(host, "g", b"x", flags=IN_PLACE)
    assert stat.S_IMODE((agent.root / "g").stat().st_mode) == 0o644
    bad: list[tuple[Tag, int | bytes | str]] = [(Tag.PATH, "f"), (Tag.FLAGS, IN_PLACE), (Tag.OFFSET, (1 << 64) - 1)]
    assert host.call(Op.WRITE, bad, b"").errno == errno.EINVAL


def test_an_exclusive_write_never_replaces(agent: Agent, host: Connection) -> None:
    write(host, "f", b"first", flags=EXCLUSIVE)
    for flags in (EXCLUSIVE, EXCLUSIVE | IN_PLACE):
        assert host.call(Op.WRITE, [(Tag.PATH, "f"), (Tag.FLAGS, flags)], b"x").errno == errno.EEXIST
    stream = host.open(Op.WRITE, [(Tag.PATH, "g"), (Tag.FLAGS, EXCLUSIVE)])
    host.data(stream, b"mine")
    host.hello()
    (agent.root / "g").write_bytes(b"theirs")  # made between the beginning and the end
    host.end(stream)
    assert host.finish(stream).errno == errno.EEXIST
    assert (agent.root / "g").read_bytes() == b"theirs"
    assert leftovers(agent) == []


def test_a_write_shows_all_or_nothing(agent: Agent) -> None:
    (agent.root / "f").write_bytes(b"old")
    with agent.connect() as host:
        stream = host.open(Op.WRITE, [(Tag.PATH, "f")])
        host.data(stream, bytes(500_000))
        host.hello()
        assert (agent.root / "f").read_bytes() == b"old"
        assert leftovers(agent) != []
    eventually(lambda: leftovers(agent) == [])
    assert (agent.root / "f").read_bytes() == b"old"
    with agent.connect() as host:
        stream = host.open(Op.WRITE, [(Tag.PATH, "f")])
        host.send(FrameType.CLOSE, stream)
        assert host.finish(stream).errno == errno.ECANCELED
    assert leftovers(agent) == []


def test_a_link_is_written_through(agent: Agent, host: Connection) -> None:
    (agent.root / "f").write_bytes(b"old")
    (agent.root / "l").symlink_to("f")
    write(host, "l", b"new")
    assert (agent.root / "l").is_symlink()
    assert (agent.root / "f").read_bytes() == b"new"
    (agent.root / "dangling").symlink_to("made")
    write(host, "dangling", b"here")
    assert (agent.root / "made").read_bytes() == b"here"
    (agent.root / "loop").symlink_to("loop")
    assert host.call(Op.WRITE, [(Tag.PATH, "loop")], b"").errno == errno.ELOOP


def test_a_full_disk_is_an_error_and_leaves_nothing(host: Connection, agent: Agent) -> None:
    assert host.call(Op.WRITE, [(Tag.PATH, "/proc/x")], b"").last.type is FrameType.ERROR
    stream = host.open(Op.WRITE, [(Tag.PATH, "/dev/full/x")])
    assert host.finish(stream).errno == errno.ENOTDIR


# --- removing


def test_removing(agent: Agent, host: Connection) -> None:
    (agent.root / "d" / "e" / "f").mkdir(parents=True)
    (agent.root / "outside").mkdir()
    (agent.root / "outside" / "precious").write_text("")
    for n in range(600):
        (agent.root / "d" / "e" / str(n)).write_text("")
    (agent.root / "d" / "link").symlink_to("../outside")
    assert host.call(Op.REMOVE, [(Tag.PATH, "d")]).errno == errno.ENOTEMPTY
    assert host.call(Op.REMOVE, [(Tag.PATH, "d"), (Tag.FLAGS, 1)]).end is not None
    assert os.listdir(agent.root) == ["outside"]
    assert os.listdir(agent.root / "outside") == ["precious"]
    assert host.call(Op.REMOVE, [(Tag.PATH, "d")]).errno == errno.ENOENT
    assert host.call(Op.REMOVE, [(Tag.PATH, "d"), (Tag.FLAGS, 2)]).end is not None
    (agent.root / "l").symlink_to("outside")
    assert host.call(Op.REMOVE, [(Tag.PATH, "l"), (Tag.FLAGS, 1)]).end is not None
    assert os.listdir(agent.root / "outside") == ["precious"]


def test_removing_a_very_deep_tree(agent: Agent, host: Connection) -> None:
    """Deeper than any path can say."""
    make = "import os\nfor i in range(1000): os.mkdir('ddddd'); os.chdir('ddddd')"
    assert host.run("a", "python3", "-c", make).exit_code == 0
    assert host.call(Op.REMOVE, [(Tag.PATH, "ddddd"), (Tag.FLAGS, 1)]).end is not None
    assert os.listdir(agent.root) == []


@pytest.mark.parametrize("depth", [1, 40])
def test_removing_spares_what_a_moved_tree_comes_to_lie_beside(agent: Agent, host: Connection, depth: int) -> None:
    """Going up from a directory that was moved leads to somebody else's files."""
    deep = agent.root.joinpath("d", *["x"] * depth)
    deep.mkdir(parents=True)
    (agent.root / "elsewhere").mkdir()
    (agent.root / "elsewhere" / "precious").write_text("")
    for n in range(3000):
        (deep / str(n)).touch()
    stream = host.open(Op.REMOVE, [(Tag.PATH, "d"), (Tag.FLAGS, 1)])
    try:
        eventually(lambda: len(os.listdir(deep)) < 3000)
        deep.rename(agent.root / "elsewhere" / "moved")
    except FileNotFoundError:
        assert depth == 1, "it was gone before it could be moved"
    answer = host.finish(stream)
    assert (agent.root / "elsewhere" / "precious").exists()
    assert answer.last.type is (FrameType.ERROR if depth > 16 else FrameType.END)


def test_others_get_their_turn_while_a_tree_is_removed(agent: Agent, host: Connection) -> None:
    for n in range(2000):
        (agent.root / f"d{n}").mkdir()
    stream = host.open(Op.REMOVE, [(Tag.PATH, str(agent.root)), (Tag.FLAGS, 1)])
    host.hello()
    assert agent.root.exists()
    assert host.finish(stream).last.type is FrameType.END
    agent.root.mkdir()


@pytest.mark.parametrize("cut", [Op.READ, Op.WALK, Op.GET_TREE, Op.LIST, Op.WATCH, Op.REMOVE, Op.WRITE, Op.PUT_TREE])
def test_a_connection_cut_in_the_middle_leaves_no_descriptor(agent: Agent, cut: Op) -> None:
    with (agent.root / "big").open("wb") as big:
        big.truncate(10_000_000)
    for n in range(1000):
        (agent.root / f"d{n}").mkdir()
    before = agent.descriptors()
    for _ in range(5):
        with agent.connect(grant=False) as host:
            path = {Op.READ: "big", Op.WRITE: "w", Op.PUT_TREE: "p"}.get(cut, ".")
            stream = host.open(cut, [(Tag.PATH, path), (Tag.FLAGS, 1)])
            if cut in (Op.WRITE, Op.PUT_TREE):
                host.send(FrameType.DATA, stream, b"d" + bytes(35))
            host.hello() if cut in (Op.WRITE, Op.PUT_TREE, Op.REMOVE) else host.next(stream)
    eventually(lambda: agent.descriptors() == before, "the release of every descriptor")


def test_listing_special_files(agent: Agent, host: Connection) -> None:
    special_files(agent)
    kinds = {record.path: record.kind for record in parse_records(host.call(Op.LIST, [(Tag.PATH, ".")]).body)}
    assert kinds == {b"fifo": "p", b"socket": "s"}
    devices = parse_records(host.call(Op.LIST, [(Tag.PATH, "/dev")]).body)
    assert {record.kind for record in devices if record.path == b"null"} == {"c"}
