"""What the agent may use: connections, streams, memory and descriptors."""

from __future__ import annotations

import socket

import pytest

from agent.client import Connection, eventually, frame_bytes, open_bytes
from agent.conftest import Agent
from atoll.guest.frames import MAX_STREAMS, FrameType, Op, StartFlag, Tag, encode_fields

MOST_CONNECTIONS = 64
MIB = 1 << 20


def test_the_65th_connection_waits(agent: Agent) -> None:
    hosts = [agent.connect() for _ in range(MOST_CONNECTIONS)]
    for host in hosts:
        host.hello()
    late = agent.connect()
    stream = late.open(Op.HELLO)
    late.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        late.receive()
    late.sock.settimeout(20)
    assert hosts[0].call(Op.STATS).end.int(Tag.CONNECTIONS) == MOST_CONNECTIONS
    hosts[7].close()
    assert late.finish(stream).end.int(Tag.VERSION) == 1


def test_4096_streams_of_one_connection(agent: Agent, host: Connection) -> None:
    (agent.root / "f").write_bytes(b"content")
    opened = range(1, MAX_STREAMS + 1)
    fields = encode_fields([(Tag.PATH, "w"), (Tag.FLAGS, 2)])
    host.sock.sendall(b"".join(open_bytes(n, Op.WRITE, fields) for n in opened))
    host.skip_to(MAX_STREAMS)
    other = agent.connect()
    eventually(lambda: other.call(Op.STATS).end.int(Tag.STREAMS) == MAX_STREAMS + 1)
    host.sock.sendall(b"".join(frame_bytes(FrameType.DATA, n, b"x") + frame_bytes(FrameType.END, n) for n in opened))
    for n in opened:
        assert host.finish(n).end.int(Tag.SIZE) == 1
    assert other.call(Op.STATS).end.int(Tag.STREAMS) == 1
    host.hello()


def test_an_idle_agent_is_small_after_a_flood(release_agent: Agent) -> None:
    host = release_agent.connect()
    flood = host.run("a", "head -c 60000000 /dev/zero", flags=StartFlag.FORGET)
    assert len(flood.stdout) == 60_000_000
    host.call(Op.WRITE, [(Tag.PATH, "f")], bytes(30_000_000))
    assert len(host.call(Op.READ, [(Tag.PATH, "f")]).body) == 30_000_000
    listing = [host.open(Op.STAT, [(Tag.PATH, "x" * 4000)]) for _ in range(1000)]
    for stream in listing:
        host.finish(stream)
    eventually(lambda: release_agent.private_bytes() < MIB, "a small agent")


def test_an_idle_agent_is_small_after_a_thousand_commands(release_agent: Agent) -> None:
    host = release_agent.connect()
    host.hello()
    before = release_agent.descriptors()
    for first in range(0, 1000, 50):
        streams = [
            host.start(f"p{first + n}", "echo", "x" * 1000, flags=StartFlag.FORGET | StartFlag.STATUS)
            for n in range(50)
        ]
        for stream in streams:
            assert len(host.finish(stream).stdout) == 1001
    eventually(lambda: not host.call(Op.PROCESSES).body)
    eventually(lambda: release_agent.private_bytes() < MIB, "a small agent")
    eventually(lambda: release_agent.descriptors() == before, "the release of every descriptor")
    assert release_agent.others() == []


@pytest.mark.parametrize("cut", ["START", "PTY", "ATTACH", "KILL", "PROCESSES", "CONNECT", "GET_TREE"])
def test_a_connection_cut_in_the_middle_leaves_nothing(agent: Agent, cut: str) -> None:
    """As for files in test_files.py, here for what has a process or a peer behind it."""
    (agent.root / "f").write_bytes(bytes(3_000_000))
    flood = "head -c 600000 /dev/zero; sleep 0.05"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(agent.root / "s"))
        listener.listen(128)
        before = agent.descriptors()
        for n in range(8):
            with agent.connect(grant=False) as host:
                if cut in ("START", "PTY", "ATTACH", "KILL"):
                    flags = StartFlag.FORGET | StartFlag.STARTED | (StartFlag.PTY if cut == "PTY" else StartFlag.STDIN)
                    stream = host.start(f"p{n}", flood, flags=flags)
                    host.next(stream)
                    host.data(stream, bytes(100_000) if n % 2 and cut != "PTY" else b"x")
                    if cut in ("ATTACH", "KILL"):
                        host.open(Op[cut], [(Tag.ID, f"p{n}"), *([(Tag.SIGNAL, 9)] if cut == "KILL" else [])])
                elif cut == "CONNECT":
                    stream = host.open(Op.CONNECT, [(Tag.PATH, "s")])
                    host.data(stream, bytes(200_000))
                else:
                    host.open(Op[cut], [(Tag.PATH, ".")])
                if n % 3:
                    host.hello()
                if n % 4 == 3:  # in the middle of a frame
                    host.sock.sendall(frame_bytes(FrameType.DATA, 1, bytes(1000))[: 12 + n])
        watcher = agent.connect()
        eventually(lambda: not watcher.call(Op.PROCESSES).body, "the end of the commands")
        eventually(lambda: agent.descriptors() == before + 1, "the release of every descriptor")
        assert agent.others() == []
