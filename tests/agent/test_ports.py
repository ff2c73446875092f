"""Ports: a stream joined to a TCP port or a unix socket inside."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from agent.client import Connection, eventually
from agent.conftest import Agent
from atoll.guest.frames import EventKind, FrameType, Op, Tag
from needs import not_applicable

Serve = Callable[[socket.socket], None]


@contextlib.contextmanager
def served(listener: socket.socket, serve: Serve) -> Iterator[None]:
    """The first that connects is served."""

    def run() -> None:
        with listener, listener.accept()[0] as peer:
            peer.settimeout(20)
            serve(peer)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(20)
    assert not thread.is_alive()


def listen(family: socket.AddressFamily, agent: Agent) -> tuple[socket.socket, tuple[Tag, int | str]]:
    listener = socket.socket(family)
    listener.settimeout(20)
    if family == socket.AF_UNIX:
        listener.bind(str(agent.root / "s"))
    else:
        listener.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
    listener.listen()
    return listener, (Tag.PATH, "s") if family == socket.AF_UNIX else (Tag.PORT, listener.getsockname()[1])


def echo(peer: socket.socket) -> None:
    while data := peer.recv(1 << 16):
        peer.sendall(data)


def connect(host: Connection, where: tuple[Tag, int | str]) -> int:
    stream = host.open(Op.CONNECT, [where])
    host.event(stream, EventKind.CONNECTED)
    return stream


def data_until_eof(host: Connection, stream: int) -> bytes:
    seen = bytearray()
    while (frame := host.next(stream)).type is FrameType.DATA:
        seen += frame.payload
    assert frame.kind is EventKind.EOF
    return bytes(seen)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6, socket.AF_UNIX], ids=lambda family: family.name)
def test_both_ways(agent: Agent, host: Connection, family: socket.AddressFamily) -> None:
    try:
        listener, where = listen(family, agent)
    except OSError:
        not_applicable("this machine has no such addresses")
    with served(listener, echo):
        stream = connect(host, where)
        host.data(stream, b"there")
        host.until(stream, b"there", channel=0)
        host.data(stream, b" and back")
        host.end(stream)
        assert data_until_eof(host, stream) == b" and back"
        assert host.next(stream).type is FrameType.END
    eventually(lambda: agent.sockets() == 2)


def test_what_cannot_be_reached(agent: Agent, host: Connection) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert host.call(Op.CONNECT, [(Tag.PORT, unused.getsockname()[1])]).errno == errno.ECONNREFUSED
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(agent.root / "dead"))
    assert host.call(Op.CONNECT, [(Tag.PATH, "dead")]).errno == errno.ECONNREFUSED
    assert host.call(Op.CONNECT, [(Tag.PATH, "missing")]).errno == errno.ENOENT
    assert host.call(Op.CONNECT, [(Tag.PATH, "x" * 200)]).errno == errno.ENAMETOOLONG
    for bad in ([(Tag.PORT, 65536)], [(Tag.PORT, 1 << 63)], []):
        assert host.call(Op.CONNECT, bad).errno == errno.EINVAL
    assert agent.sockets() == 2


def test_input_before_the_connection_stands_is_kept(agent: Agent, host: Connection) -> None:
    listener, where = listen(socket.AF_INET, agent)
    with served(listener, echo):
        stream = host.open(Op.CONNECT, [where])
        host.data(stream, b"early")
        host.end(stream)
        answer = host.finish(stream)
    assert answer.body == b"early"
    assert answer.last.type is FrameType.END


def test_the_host_ends_first(agent: Agent, host: Connection) -> None:
    def serve(peer: socket.socket) -> None:
        seen = b""
        while data := peer.recv(100):
            seen += data
        peer.sendall(b"after the end: " + seen)

    listener, where = listen(socket.AF_INET, agent)
    with served(listener, serve):
        stream = connect(host, where)
        host.data(stream, b"question")
        host.end(stream)
        assert data_until_eof(host, stream) == b"after the end: question"
        assert host.next(stream).type is FrameType.END


def test_the_peer_ends_first(agent: Agent, host: Connection) -> None:
    got = bytearray()

    def serve(peer: socket.socket) -> None:
        peer.sendall(b"hello")
        peer.shutdown(socket.SHUT_WR)
        while data := peer.recv(1 << 16):
            got.extend(data)

    listener, where = listen(socket.AF_INET, agent)
    with served(listener, serve):
        stream = connect(host, where)
        assert data_until_eof(host, stream) == b"hello"
        host.data(stream, bytes(1_000_000))
        host.end(stream)
        assert host.next(stream).type is FrameType.END
    assert len(got) == 1_000_000


def test_a_peer_that_resets(agent: Agent, host: Connection) -> None:
    def serve(peer: socket.socket) -> None:
        peer.recv(1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    listener, where = listen(socket.AF_INET, agent)
    with served(listener, serve):
        stream = connect(host, where)
        host.data(stream, bytes(1000))
        assert data_until_eof(host, stream) == b""
        host.data(stream, bytes(3_000_000))  # nobody takes it, and it does not get stuck
        host.end(stream)
        assert host.finish(stream).last.type is FrameType.END
    host.hello()


def test_64_mib_both_ways_at_once_come_through_whole(agent: Agent, host: Connection) -> None:
    block = random.Random(1).randbytes(1 << 20)
    sent, received = hashlib.sha256(), hashlib.sha256()
    listener, where = listen(socket.AF_UNIX, agent)
    with served(listener, echo):
        stream = connect(host, where)
        for n in range(64):
            part = n.to_bytes(4, "big") + block[4:]
            sent.update(part)
            host.data(stream, part)
        host.end(stream)
        size = 0
        while (frame := host.next(stream)).type is FrameType.DATA:
            received.update(frame.payload)
            size += len(frame.payload)
        assert (frame.kind, size) == (EventKind.EOF, 64 << 20)
        assert received.digest() == sent.digest()
        assert host.finish(stream).last.type is FrameType.END


def test_a_peer_that_does_not_read_and_a_host_that_does_not(agent: Agent) -> None:
    """Each stops the other, and nobody else."""
    done = threading.Event()

    def serve(peer: socket.socket) -> None:
        peer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                peer.send(bytes(1 << 16))
        done.wait(20)

    host = agent.connect(grant=False)
    listener, where = listen(socket.AF_UNIX, agent)
    with served(listener, serve):
        stream = connect(host, where)
        sent = 0
        host.sock.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            while sent < 50_000_000:
                host.data(stream, bytes(10_000))
                sent += 10_000
        assert sent < 2_000_000
        agent.connect().hello()
        done.set()
