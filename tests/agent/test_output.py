"""Kept output: absolute offsets, what is dropped is said, and nothing in between is ever wrong."""

from __future__ import annotations

import random

import pytest

from agent.client import Answer, Connection, eventually
from agent.conftest import Agent
from atoll.guest.frames import EventKind, Op, StartFlag, Tag

CHUNK = 65536
"""A ring may keep this much more than KEEP."""
COUNT = "import sys; w = sys.stdout.buffer; [w.write(b'%07d\\n' % i) for i in range({})]"
DETACH = StartFlag.DETACH


def counted(lines: int) -> bytes:
    return b"".join(b"%07d\n" % n for n in range(lines))


def attach(host: Connection, id: str, *offsets: int) -> Answer:
    tags = (Tag.OFFSET_1, Tag.OFFSET_2, Tag.OFFSET_3)
    return host.call(Op.ATTACH, [(Tag.ID, id), *zip(tags, offsets, strict=False)])


def wait_for_end(host: Connection, id: str) -> int:
    """Without listening: nothing is attached while it runs."""
    while True:
        answer = attach(host, id, 1 << 62, 1 << 62)
        if answer.end.int(Tag.CAUSE):
            return answer.end.int(Tag.END_1)


@pytest.mark.parametrize("keep", [0, 1, 4096, 70_000, 1 << 20])
def test_the_end_of_a_long_output_is_kept_exactly(host: Connection, keep: int) -> None:
    lines = 300_000  # 2.4 MB, several times around every ring
    expected = counted(lines)
    host.run("a", "python3", "-c", COUNT.format(lines), keep=keep, flags=DETACH)
    eventually(lambda: host.call(Op.STATS).end.int(Tag.OUTPUT_BYTES) == len(expected))
    answer = attach(host, "a")
    first = answer.event(EventKind.ATTACHED).int(Tag.OFFSET_1)
    assert answer.end.int(Tag.END_1) == len(expected)
    assert answer.stdout == expected[first:]
    assert keep <= len(answer.stdout) <= keep + CHUNK


def test_every_offset_gives_the_same_bytes(host: Connection) -> None:
    expected = counted(20_000)
    host.run("a", "python3", "-c", COUNT.format(20_000))
    chance = random.Random(1)
    for offset in [0, 1, len(expected) - 1, len(expected), *(chance.randrange(len(expected)) for _ in range(20))]:
        answer = attach(host, "a", offset)
        assert answer.event(EventKind.ATTACHED).int(Tag.OFFSET_1) == offset
        assert answer.stdout == expected[offset:]
    beyond = attach(host, "a", len(expected) + 5)
    assert beyond.event(EventKind.ATTACHED).int(Tag.OFFSET_1) == len(expected)
    assert beyond.stdout == b""


def test_nothing_is_dropped_while_a_stream_is_attached(agent: Agent) -> None:
    """Not even when it is far slower than the process: the process waits."""
    expected = counted(500_000)
    host = agent.connect()
    answer = host.run("a", "python3", "-c", COUNT.format(500_000), keep=1000)
    assert answer.stdout == expected
    assert answer.end.int(Tag.END_1) == len(expected)


def test_going_away_and_coming_back_loses_nothing_that_is_kept(agent: Agent) -> None:
    """Connections cut at random places; together they saw every byte once."""
    lines = 600_000
    expected, seen = counted(lines), b""
    chance = random.Random(3)
    with agent.connect() as host:
        host.finish(host.start("a", "python3", "-c", COUNT.format(lines), keep=16 << 20, flags=DETACH))
    while len(seen) < len(expected):
        with agent.connect() as host:
            stream = host.open(Op.ATTACH, [(Tag.ID, "a"), (Tag.OFFSET_1, len(seen))])
            event = host.event(stream, EventKind.ATTACHED)
            assert event.int(Tag.OFFSET_1) == len(seen)
            for _ in range(chance.randrange(1, 30)):
                seen += host.next(stream).payload
                if len(seen) >= len(expected):
                    break
    assert seen == expected


def test_both_channels_have_their_own_offsets(host: Connection) -> None:
    host.run("a", "echo out; echo error >&2")
    answer = attach(host, "a", 1, 2)
    assert (answer.stdout, answer.stderr) == (b"ut\n", b"ror\n")


def test_a_stream_that_takes_over_at_the_end_sets_a_stuck_process_free(agent: Agent) -> None:
    """The first stream reads nothing, so the ring is full; the second wants only what comes from now on."""
    deaf = agent.connect(grant=False)
    deaf.start("a", "head -c 5000000 /dev/zero; echo end", keep=0)
    host = agent.connect()
    eventually(lambda: host.call(Op.STATS).end.int(Tag.OUTPUT_BYTES) >= 262_144)
    answer = attach(host, "a", 1 << 62)
    assert answer.stdout.endswith(b"end\n")


def test_what_is_left_running_does_not_push_out_the_output(agent: Agent, host: Connection) -> None:
    answer = host.run("a", "(sleep 0.1; exec cat /dev/zero) & echo mine", keep=100)
    assert answer.stdout == b"mine\n"
    other = agent.connect()
    eventually(lambda: other.call(Op.STATS).end.int(Tag.OUTPUT_BYTES) > 1_000_000)
    again = attach(host, "a")
    assert again.stdout == b"mine\n"
    assert again.end.int(Tag.END_1) == 5
    host.kill("a")
