"""The other ways in: over standard input and output, and through the bridge that `atoll-agent connect` is."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.client import ClosedError, Connection, eventually, frame_bytes
from agent.conftest import ENCLOSED, SANITIZER_OPTIONS, children_of
from atoll.guest.frames import FrameType, Op, StartFlag, Tag

ENVIRONMENT = {"PATH": os.environ["PATH"], **SANITIZER_OPTIONS}


class Pipes:
    """Two descriptors as one wire."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._patience: float | None = None

    def sendall(self, data: bytes, /) -> None:
        while data:
            data = data[os.write(self._writing, data) :]

    def recv(self, most: int, /) -> bytes:
        if not select.select([self._reading], [], [], self._patience)[0]:
            raise TimeoutError
        return os.read(self._reading, most)

    def settimeout(self, seconds: float | None, /) -> None:
        self._patience = seconds

    def shutdown(self, how: int, /) -> None:
        os.close(self._writing)
        self._writing = -1

    def close(self) -> None:
        os.close(self._reading)
        if self._writing >= 0:
            os.close(self._writing)


@contextlib.contextmanager
def agent_over(binary: Path, folder: Path, stdin: int, stdout: int, *more: str) -> Iterator[int]:
    """An agent with these as its standard streams; gives its process number."""
    log = folder / "log"
    with log.open("wb") as messages:
        enclosure = subprocess.Popen(
            [*ENCLOSED, str(binary), "--stdio", "--work-dir", str(folder), *more],
            stdin=stdin,
            stdout=stdout,
            stderr=messages,
            env=ENVIRONMENT,
        )
    try:
        eventually(lambda: children_of(enclosure.pid) != [])
        (pid,) = children_of(enclosure.pid)
        handle = os.pidfd_open(pid)
        try:
            yield pid
            assert enclosure.poll() is None, "the agent has ended"
            if "sanitizer" in binary.name:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                assert enclosure.wait(20) == 0, log.read_text()
        finally:
            enclosure.kill()
            enclosure.wait()
            select.select([handle], [], [], 20)
            os.close(handle)
    finally:
        enclosure.kill()
        enclosure.wait()
    assert log.read_text() == ""


@pytest.fixture
def binary(build: str, agent_builds: dict[str, Path]) -> Path:
    return agent_builds[build]


def busy_ticks(pid: int) -> int:
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(words[11]) + int(words[12])


def test_a_socket_as_standard_streams(binary: Path, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with agent_over(binary, tmp_path, theirs.fileno(), theirs.fileno()) as pid:
        theirs.close()
        with Connection(ours) as host:
            assert host.hello().int(Tag.PID) == 1
            assert host.run("a", "cat", "/proc/self/fd/0").stdout == b""  # a command's own input, not the wire
            host.run("b", "sleep 100", flags=StartFlag.DETACH)
        time.sleep(0.3)
        assert children_of(pid) != []  # what runs goes on, and so does the agent
        before = busy_ticks(pid)
        time.sleep(0.5)
        assert busy_ticks(pid) - before <= 2
        assert not [name for name in os.listdir(f"/proc/{pid}/fd") if _is_socket(pid, name)]


def _is_socket(pid: int, name: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    except OSError:
        return False


def test_a_refused_connection_over_standard_streams_is_told_so(binary: Path, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with agent_over(binary, tmp_path, theirs.fileno(), theirs.fileno()):
        theirs.close()
        with Connection(ours) as host:
            host.hello()
            host.send(99, 1)
            assert host.refusal().errno == errno.EPROTO


@pytest.fixture
def fifos(tmp_path: Path) -> tuple[str, str]:
    names = str(tmp_path / "in"), str(tmp_path / "out")
    for name in names:
        os.mkfifo(name)
    return names


def reopen(fifos: tuple[str, str]) -> Connection:
    time.sleep(0.25)  # one who comes before the agent has seen the end of the last would be taken for him
    return Connection(Pipes(os.open(fifos[1], os.O_RDONLY | os.O_NONBLOCK), os.open(fifos[0], os.O_WRONLY)))


def test_fifos_are_used_again(binary: Path, tmp_path: Path, fifos: tuple[str, str]) -> None:
    """Each end of the input ends a connection and its streams, and neither the agent nor what it runs."""
    stdin, stdout = os.open(fifos[0], os.O_RDONLY | os.O_NONBLOCK), os.open(fifos[1], os.O_RDWR)
    with agent_over(binary, tmp_path, stdin, stdout) as pid:
        os.close(stdin)
        with reopen(fifos) as host:
            instance = host.hello().bytes(Tag.INSTANCE)
            host.run("a", "sleep 0.2; echo late", flags=StartFlag.DETACH)
        for n in range(4):
            with reopen(fifos) as host:
                again = host.hello()
                assert again.bytes(Tag.INSTANCE) == instance
                stats = host.call(Op.STATS).end
                assert (stats.int(Tag.CONNECTIONS), stats.int(Tag.STREAMS)) == (1, 1)
                if n == 1:
                    assert host.call(Op.ATTACH, [(Tag.ID, "a")]).stdout == b"late\n"
                if n == 2:  # dies in the middle of a frame, with a stream open
                    host.start("b", "cat", flags=StartFlag.STDIN)
                    host.sock.sendall(frame_bytes(FrameType.DATA, 3, bytes(1000))[:500])
        before = busy_ticks(pid)
        time.sleep(0.5)
        assert busy_ticks(pid) - before <= 2  # waiting costs next to nothing
        os.close(stdout)


def test_what_a_refused_host_still_says_is_not_taken_for_the_next(
    binary: Path, tmp_path: Path, fifos: tuple[str, str]
) -> None:
    stdin, stdout = os.open(fifos[0], os.O_RDONLY | os.O_NONBLOCK), os.open(fifos[1], os.O_RDWR)
    with agent_over(binary, tmp_path, stdin, stdout):
        os.close(stdin)
        with reopen(fifos) as host:
            host.hello()
            host.send(99, 1)
            assert host.receive().stream == 0
            for _ in range(50):
                host.send(FrameType.OPEN, 7, bytes(3000))
            time.sleep(0.2)
        with reopen(fifos) as host:
            host.hello()
        os.close(stdout)


# --- the bridge


@contextlib.contextmanager
def bridge(binary: Path, address: Path) -> Iterator[Connection]:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [*ENCLOSED, str(binary), "connect", str(address)],
        stdin=theirs.fileno(),
        stdout=theirs.fileno(),
        env=ENVIRONMENT,
    )
    theirs.close()
    try:
        with Connection(ours) as host:
            yield host
            ours.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ClosedError):
                while True:
                    host.receive()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_bridges_beside_the_first_connection(binary: Path, tmp_path: Path) -> None:
    """As the engine for gVisor uses it: docs/decisions/0013."""
    ours, theirs = socket.socketpair()
    address = tmp_path / "agent"
    with agent_over(binary, tmp_path, theirs.fileno(), theirs.fileno(), "--listen-path", str(address)):
        theirs.close()
        first = Connection(ours)
        instance = first.hello().bytes(Tag.INSTANCE)
        with bridge(binary, address) as host:
            assert host.hello().bytes(Tag.INSTANCE) == instance
            data = os.urandom(3_000_000)
            stream = host.start("a", "cat", flags=StartFlag.STDIN)
            host.data(stream, data)
            host.end(stream)
            assert host.finish(stream).stdout == data
        first.close()
        with bridge(binary, address) as host:
            assert host.hello().bytes(Tag.INSTANCE) == instance
            assert host.call(Op.STATS).end.int(Tag.CONNECTIONS) == 1


def test_a_bridge_without_an_agent_fails(binary: Path, tmp_path: Path) -> None:
    for address in (tmp_path / "nothing", tmp_path / ("x" * 200)):
        ended = subprocess.run(
            [*ENCLOSED, str(binary), "connect", str(address)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=ENVIRONMENT,
        )
        assert ended.returncode in (1, 2)


def test_what_is_said_wrongly_on_the_command_line(binary: Path) -> None:
    for words in (
        ["--what"],
        [],
        ["--listen-fd"],
        ["--as", "0:0", "--", "true"],
        ["--as", "1:4294967295", "--", "true"],
    ):
        ended = subprocess.run(
            [*ENCLOSED, str(binary), *words], stdin=subprocess.DEVNULL, capture_output=True, env=ENVIRONMENT
        )
        assert ended.returncode == 2, words


def test_an_agent_ends_when_its_lifetime_is_over_whatever_runs(binary: Path, tmp_path: Path) -> None:
    address = tmp_path / "socket"
    words = ["--listen-path", str(address), "--work-dir", str(tmp_path), "--lifetime-ms", "1500"]
    with subprocess.Popen([*ENCLOSED, str(binary), *words], env=ENVIRONMENT) as enclosure:
        try:
            eventually(address.exists)
            with socket.socket(socket.AF_UNIX) as ours:
                ours.connect(str(address))
                with Connection(ours) as host:
                    host.run("a", "trap '' TERM HUP; sleep 1000", flags=StartFlag.DETACH)
                    assert enclosure.wait(30) == 75
        finally:
            enclosure.kill()
