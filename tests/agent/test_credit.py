"""Credit: a stream whose reader is slow stops alone, and costs no memory."""

from __future__ import annotations

from agent.client import Connection, eventually
from agent.conftest import Agent
from atoll.guest.frames import WINDOW, FrameType, Op, Tag

FLOOD = "exec head -c 3000000 /dev/zero"


def test_a_stream_without_credit_stops_alone(agent: Agent) -> None:
    host = agent.connect(grant=False)
    stream = host.start("flood", FLOOD)
    got = 0
    while got < WINDOW:
        frame = host.next(stream)
        assert frame.type is FrameType.DATA
        got += len(frame.payload)
    assert got == WINDOW
    assert host.run("other", "echo fine").stdout == b"fine\n"
    host.give_credit(stream, 5)
    assert len(host.next(stream).payload) == 5
    host.hello()
    host.grant = True
    host.give_credit(stream, WINDOW)
    assert len(host.finish(stream).stdout) == 3_000_000 - WINDOW - 5


def test_a_flood_on_one_stream_lets_others_through(host: Connection) -> None:
    flood = host.start("flood", "exec cat /dev/zero")
    host.give_credit(flood, 1 << 31)
    for n in range(20):
        assert host.run(f"other{n}", "echo fine").stdout == b"fine\n"
    assert host.kill("flood").end is not None


def test_a_flood_on_one_connection_lets_others_through(agent: Agent) -> None:
    """Even when its host has given all the credit there is, and reads as fast as it can."""
    noisy = agent.connect(grant=False)
    (agent.root / "big").write_bytes(b"")
    with (agent.root / "big").open("r+b") as big:
        big.truncate(200_000_000)
    stream = noisy.open(Op.READ, [(Tag.PATH, "big")])
    noisy.give_credit(stream, 0xFFFFFFFF)
    quiet = agent.connect()
    for _ in range(20):
        quiet.hello()
    assert len(noisy.finish(stream).body) == 200_000_000


def test_a_host_that_asks_and_does_not_read_is_no_longer_listened_to(agent: Agent) -> None:
    deaf = agent.connect(grant=False)
    deaf.sock.settimeout(1)
    sent = 0
    try:
        while sent < 100_000_000:
            deaf.open(Op.STAT, [(Tag.PATH, "x" * 4000)])
            sent += 4000
    except TimeoutError:
        pass
    assert sent < 20_000_000
    agent.connect().hello()


def test_what_waits_for_a_slow_host_is_little(release_agent: Agent) -> None:
    """Neither floods nor files pile up in the agent; a ring of a megabyte is all that a process may fill."""
    host = release_agent.connect(grant=False)
    with (release_agent.root / "big").open("wb") as big:
        big.truncate(100_000_000)
    for n in range(100):
        host.open(Op.READ, [(Tag.PATH, "big")])
        host.start(f"flood{n}", "head -c 100000 /dev/zero; sleep 100")
    watcher = release_agent.connect()
    running = Op.STATS
    eventually(lambda: watcher.call(running).end.int(Tag.OUTPUT_BYTES) == 100 * 100_000)
    assert release_agent.private_bytes() < 60_000_000
