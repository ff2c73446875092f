"""Files, watches and ports through the real agent."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.guest import FileEventKind, Files, Guest, StartRequest
from unit.guest.conftest import RealAgent

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize("size", [0, 1, 262_144, 262_145, 3_000_000])
async def test_what_is_written_is_read_again(guest: Guest, agent: RealAgent, size: int) -> None:
    data = os.urandom(size)
    assert await guest.files.write("new/dir/file", data) == size
    assert (agent.root / "new/dir/file").read_bytes() == data
    assert await guest.files.read("new/dir/file") == data


async def test_parts_of_a_file_can_be_read_and_written(guest: Guest, agent: RealAgent) -> None:
    await guest.files.write("f", b"0123456789")
    assert await guest.files.read("f", offset=3, length=4) == b"3456"
    assert await guest.files.read("f", offset=8, length=100) == b"89"
    assert await guest.files.read("f", offset=20) == b""
    await guest.files.write("f", b"XY", in_place_offset=2)
    await guest.files.write("f", b"end", append=True)
    assert (agent.root / "f").read_bytes() == b"01XY456789end"
    assert await guest.files.read("f", length=2, limit_bytes=2) == b"01"
    with pytest.raises(OSError, match="more than 5 bytes: 'f'"):
        await guest.files.read("f", limit_bytes=5)
    with pytest.raises(FileExistsError, match="'f'"):
        await guest.files.write("f", b"", exclusive=True)


async def test_modes_are_kept_unless_given(guest: Guest, agent: RealAgent) -> None:
    await guest.files.write("f", b"1")
    assert stat.S_IMODE((agent.root / "f").stat().st_mode) == 0o644
    await guest.files.write("f", b"2", mode=0o751)
    await guest.files.write("f", b"3")
    assert stat.S_IMODE((agent.root / "f").stat().st_mode) == 0o751


async def test_streams_of_any_kind_can_be_written_and_read(guest: Guest, agent: RealAgent) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for number in range(100):
            yield b"%d," % number * 2000
            await asyncio.sleep(0)

    expected = b"".join(b"%d," % number * 2000 for number in range(100))
    assert await guest.files.write_stream("f", pieces()) == len(expected)
    assert b"".join([piece async for piece in guest.files.read_stream("f")]) == expected
    await guest.files.write_stream("g", [b"a", b"", b"b"])
    assert (agent.root / "g").read_bytes() == b"ab"
    async for _ in guest.files.read_stream("f"):
        break
    assert await guest.files.read("g") == b"ab"


async def test_a_write_that_is_given_up_changes_nothing(guest: Guest, agent: RealAgent) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"new"
        raise LookupError("no more")

    await guest.files.write("f", b"old")
    with pytest.raises(LookupError):
        await guest.files.write_stream("f", broken())
    assert await guest.files.read("f") == b"old"
    assert os.listdir(agent.root) == ["f"]


async def test_a_file_tells_what_it_is(guest: Guest, agent: RealAgent) -> None:
    (agent.root / "f").write_bytes(b"12345")
    os.chmod(agent.root / "f", 0o4750)
    os.utime(agent.root / "f", ns=(0, -1_500_000_000))
    (agent.root / "l").symlink_to("f")
    os.mkfifo(agent.root / "p")
    info = await guest.files.stat("l")
    assert (info.kind, info.size, info.mode, info.mtime_s, info.target) == ("file", 5, 0o4750, -1.5, None)
    assert (info.uid, info.gid, info.path) == (os.getuid(), os.getgid(), "l")
    link = await guest.files.stat("l", follow=False)
    assert (link.kind, link.target) == ("link", "f")
    assert (await guest.files.stat("p")).kind == "fifo"
    assert (await guest.files.stat("/dev/null")).kind == "char_device"
    assert (await guest.files.stat(str(agent.root))).kind == "directory"


async def test_directories_are_listed_and_walked(guest: Guest, agent: RealAgent) -> None:
    names = [b"b", b"a \n", b"\xff\xfe", b"c"]
    for name in names:
        (Path(os.fsdecode(os.fsencode(agent.root) + b"/" + name))).write_bytes(name)
    (agent.root / "d/e").mkdir(parents=True)
    (agent.root / "d/e/f").symlink_to("nowhere")
    listed = await guest.files.list(".")
    assert [os.fsencode(info.path) for info in listed] == sorted([*names, b"d"])
    walked = [info async for info in guest.files.walk(".")]
    assert {info.path for info in walked} == {*(info.path for info in listed), "d/e", "d/e/f"}
    paths = [info.path for info in walked]
    assert paths.index("d") < paths.index("d/e") < paths.index("d/e/f")
    assert len([info async for info in guest.files.walk(".", limit=3)]) == 3
    for number in range(3000):
        (agent.root / f"d/{number}").touch()
    assert len(await guest.files.list("d")) == 3001


async def test_names_can_be_made_changed_and_removed(guest: Guest, agent: RealAgent) -> None:
    files = guest.files
    await files.make_dir("a/b/c", mode=0o700)
    await files.make_dir("a/b/c")
    assert stat.S_IMODE((agent.root / "a/b/c").stat().st_mode) == 0o700
    with pytest.raises(FileExistsError, match="'a'"):
        await files.make_dir("a", parents=False)
    await files.rename("a/b", "x/y", parents=True)
    assert (agent.root / "x/y/c").is_dir()
    await files.symlink("l", "x")
    await files.chmod("x", 0o711)
    assert stat.S_IMODE((agent.root / "x").stat().st_mode) == 0o711
    await files.chown("x", os.getuid(), os.getgid())
    with pytest.raises(OSError, match="'x'"):
        await files.remove("x")
    await files.remove("l", recursive=True)
    assert (agent.root / "x").is_dir()
    await files.remove("x", recursive=True)
    assert os.listdir(agent.root) == ["a"]
    await files.remove("x", missing_ok=True)
    with pytest.raises(FileNotFoundError, match="'x'"):
        await files.remove("x")


async def test_every_error_says_which_path(guest: Guest, agent: RealAgent) -> None:
    files = guest.files
    os.mkfifo(agent.root / "fifo")
    for operation in (
        files.stat("no"),
        files.list("no"),
        files.read("no"),
        files.chmod("no", 0),
        files.chown("no", 0, 0),
        files.write("no/no", b"", parents=False),
        files.make_dir("no/no", parents=False),
    ):
        with pytest.raises(FileNotFoundError, match="'no"):
            await operation
    with pytest.raises(FileNotFoundError, match="'no' -> 'other'"):
        await files.rename("no", "other")
    with pytest.raises(OSError, match="'fifo'") as caught:
        await files.read("fifo")
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(FileNotFoundError, match="'no'"):
        [info async for info in files.walk("no")]
    with pytest.raises(FileNotFoundError, match="'no'"):
        async with files.watch("no"):
            pass
    with pytest.raises(OSError, match="too long") as caught:
        await files.stat("x" * 5000)
    assert caught.value.errno == errno.ENAMETOOLONG
    with pytest.raises(ValueError, match="zero byte"):
        await files.stat("a\0b")


async def test_relative_paths_start_from_the_work_directory(guest: Guest, agent: RealAgent) -> None:
    (agent.root / "sub").mkdir()
    await Files(guest, str(agent.root / "sub")).write("f", b"x")
    assert (agent.root / "sub/f").exists()


async def test_changes_are_seen_as_they_happen(guest: Guest, agent: RealAgent) -> None:
    seen: dict[tuple[FileEventKind, str], bool] = {}

    async def until(*expected: tuple[FileEventKind, str]) -> None:
        while not seen.keys() >= set(expected):
            event = await events.__anext__()
            seen[event.kind, event.path] = event.is_dir

    (agent.root / "old").mkdir()
    async with guest.files.watch(".") as events:
        (agent.root / "f").write_text("x")
        await until((FileEventKind.CREATED, "f"), (FileEventKind.MODIFIED, "f"))
        (agent.root / "f").rename(agent.root / "old/g")
        await until((FileEventKind.MOVED_FROM, "f"), (FileEventKind.MOVED_TO, "old/g"))
        (agent.root / "new").mkdir()
        await until((FileEventKind.CREATED, "new"))
        (agent.root / "new/h").touch()
        await until((FileEventKind.CREATED, "new/h"))
        (agent.root / "new/h").chmod(0)
        await until((FileEventKind.ATTRIBUTES, "new/h"))
        (agent.root / "new/h").unlink()
        await until((FileEventKind.REMOVED, "new/h"))
    assert seen[FileEventKind.CREATED, "new"]
    assert not seen[FileEventKind.CREATED, "f"]
    # What had been told before it was left can still be taken; then it ends.
    async for _ in events:
        pass


async def test_closing_a_watch_ends_an_iteration_that_waits(guest: Guest) -> None:
    watch = guest.files.watch(".", recursive=False)

    async def consume() -> int:
        return len([event async for event in watch])

    async with watch:
        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
    assert await task == 0


async def test_a_port_inside_can_be_spoken_to(guest: Guest) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        await _echo(guest, server, port=server.getsockname()[1])


async def test_a_unix_socket_inside_can_be_spoken_to(guest: Guest, agent: RealAgent) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(agent.root / "sock"))
        server.listen(1)
        await _echo(guest, server, path=str(agent.root / "sock"))


async def _echo(guest: Guest, server: socket.socket, port: int | None = None, path: str | None = None) -> None:
    """Both directions at once, more than any buffer holds, each ended by itself."""

    def serve() -> None:
        peer, _ = server.accept()
        with peer:
            while data := peer.recv(65536):
                peer.sendall(data.upper())

    async def write() -> None:
        for _ in range(50):
            await stream.write(b"x" * 100_000)
        await stream.write_eof()

    server.settimeout(60)
    serving = asyncio.create_task(asyncio.to_thread(serve))
    async with await guest.ports.connect(port=port, path=path) as stream:
        writing = asyncio.create_task(write())
        size = 0
        while data := await stream.read(30_000):
            assert len(data) <= 30_000
            assert set(data) == {ord("X")}
            size += len(data)
        assert size == 5_000_000
        await writing
    await serving


async def test_a_port_where_nobody_listens_refuses(guest: Guest) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError, match=f"'port {port}'"):
        await guest.ports.connect(port=port)
    with pytest.raises(FileNotFoundError, match="/no/such"):
        await guest.ports.connect(path="/no/such")
    with pytest.raises(ValueError, match="not a port"):
        await guest.ports.connect(port=70_000)


async def test_a_slow_reader_of_one_stream_delays_no_other(guest: Guest) -> None:
    flood = await guest.processes.start(StartRequest(b"flood", shell="yes"))
    assert (await guest.hello()).pid > 0
    assert (await guest.processes.run(StartRequest(b"other", shell="echo x"), limit_bytes=9)).stdout.value() == b"x\n"
    await guest.processes.kill(b"flood")
    assert flood.offsets[0] == 0
