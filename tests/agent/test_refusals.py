"""What the agent refuses, and that it lives on: its other connections do not notice."""

from __future__ import annotations

import contextlib
import errno
import random
import struct

import pytest

from agent.client import ClosedError, Connection, eventually, frame_bytes, open_bytes
from agent.conftest import Agent
from atoll.guest.frames import MAX_PAYLOAD, MAX_STREAMS, FrameType, Op, Tag, Verb, encode_fields, encode_u16

HELLO = open_bytes(1, Op.HELLO, b"")


def start_cat(stream: int = 1) -> bytes:
    return open_bytes(stream, Op.START, encode_fields([(Tag.ID, "cat"), (Tag.ARG, "cat"), (Tag.FLAGS, 1)]))


REFUSED = {
    "payload over the limit": struct.pack("<IIBBH", MAX_PAYLOAD + 1, 1, 1, 0, 0),
    "greatest length": struct.pack("<IIBBH", 0xFFFFFFFF, 1, 2, 0, 0),
    "type 0": frame_bytes(0, 1),
    "type of the agent's": frame_bytes(FrameType.EVENT, 1),
    "unknown type": frame_bytes(99, 1),
    "reserved bytes": frame_bytes(FrameType.OPEN, 1, encode_u16(Op.HELLO), reserved=1),
    "a channel in OPEN": frame_bytes(FrameType.OPEN, 1, encode_u16(Op.HELLO), channel=1),
    "a channel in DATA": start_cat() + frame_bytes(FrameType.DATA, 1, b"x", channel=1),
    "stream 0": open_bytes(0, Op.HELLO, b""),
    "the same number again": HELLO + HELLO,
    "a falling number": open_bytes(7, Op.HELLO, b"") + open_bytes(6, Op.HELLO, b""),
    "an OPEN without an operation": frame_bytes(FrameType.OPEN, 1, b"\1"),
    "DATA for a stream that never was": frame_bytes(FrameType.DATA, 5, b"x"),
    "END for a stream that never was": frame_bytes(FrameType.END, 5),
    "CREDIT for the connection": frame_bytes(FrameType.CREDIT, 0, b"\0\0\0\0"),
    "CREDIT of three bytes": start_cat() + frame_bytes(FrameType.CREDIT, 1, b"\0\0\0"),
    "CONTROL without a verb": start_cat() + frame_bytes(FrameType.CONTROL, 1, b"\1"),
    "DATA after END": start_cat() + frame_bytes(FrameType.END, 1) + frame_bytes(FrameType.DATA, 1, b"x"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_connection_that_breaks_the_rules_is_told_so_and_closed(agent: Agent, name: str) -> None:
    bystander = agent.connect()
    with agent.connect() as host:
        host.sock.sendall(REFUSED[name])
        refusal = host.refusal()
        assert refusal.errno == errno.EPROTO
        assert refusal.fields.bytes(Tag.MESSAGE)
    bystander.hello()


def test_more_data_than_credit_is_refused(agent: Agent) -> None:
    host = agent.connect()
    stream = host.start("a", "exec sleep 100", flags=1)
    with contextlib.suppress(BrokenPipeError):
        for _ in range(2):  # a sleeping reader: the pipe takes 64 KiB, nothing is granted again for the rest
            host.send(FrameType.DATA, stream, bytes(MAX_PAYLOAD))
    assert host.refusal().errno == errno.EPROTO
    agent.connect().hello()


def test_more_streams_than_allowed_are_refused(agent: Agent) -> None:
    host = agent.connect()
    fields = encode_fields([(Tag.PATH, "t")])
    host.sock.sendall(b"".join(open_bytes(1 + n, Op.PUT_TREE, fields) for n in range(MAX_STREAMS)))
    host.skip_to(MAX_STREAMS)
    other = agent.connect()
    eventually(lambda: other.call(Op.STATS).end.int(Tag.STREAMS) == MAX_STREAMS + 1)
    host.open(Op.HELLO)
    assert host.refusal().errno == errno.EPROTO
    assert other.call(Op.STATS).end.int(Tag.STREAMS) == 1


MALFORMED = {
    "cut off in the head": b"\1\0\4",
    "cut off in the value": struct.pack("<HI", Tag.ID, 5) + b"abc",
    "longest length": struct.pack("<HI", Tag.ID, 0xFFFFFFFF) + b"abc",
    "a number of four bytes": struct.pack("<HII", Tag.SIGNAL, 4, 15),
    "a number of no bytes": struct.pack("<HI", Tag.FLAGS, 0),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("op", [Op.START, Op.KILL, Op.STAT, Op.CONNECT])
def test_malformed_fields_fail_only_their_stream(host: Connection, op: Op, name: str) -> None:
    assert host.finish(host.open_raw(op, MALFORMED[name])).errno == errno.EINVAL
    host.hello()


def test_malformed_fields_of_a_control_fail_only_its_stream(host: Connection) -> None:
    stream = host.start("a", "sleep 100")
    host.send(FrameType.CONTROL, stream, encode_u16(Verb.SIGNAL) + struct.pack("<HII", Tag.SIGNAL, 4, 15))
    assert host.finish(stream).errno == errno.EINVAL
    assert host.kill("a").end is not None


def test_an_unknown_operation_fails_only_its_stream(host: Connection) -> None:
    assert host.call(999).errno == errno.ENOSYS
    host.hello()


def test_data_for_an_operation_without_input_fails_only_its_stream(host: Connection, agent: Agent) -> None:
    stream = host.open(Op.WATCH, [(Tag.PATH, str(agent.root))])
    host.next(stream)
    host.send(FrameType.DATA, stream, b"x")
    assert host.finish(stream).errno == errno.EINVAL
    host.hello()


def test_unknown_fields_are_ignored(host: Connection) -> None:
    assert host.finish(host.open_raw(Op.HELLO, struct.pack("<HI", 60000, 3) + b"abc")).end.int(Tag.VERSION) == 1


def test_frames_for_a_stream_that_has_ended_are_ignored(host: Connection) -> None:
    stream = host.open(Op.HELLO)
    host.finish(stream)
    host.send(FrameType.DATA, stream, bytes(1000))
    host.send(FrameType.END, stream)
    host.send(FrameType.CREDIT, stream, b"\1\0\0\0")
    host.send(FrameType.CONTROL, stream, encode_u16(1))
    host.send(FrameType.CLOSE, stream)
    host.hello()


def test_a_closed_stream_ends_with_one_error(host: Connection) -> None:
    stream = host.start("a", "sleep 100")
    host.send(FrameType.CLOSE, stream)
    assert host.finish(stream).errno == errno.ECANCELED
    host.hello()


def test_a_host_that_stops_in_the_middle_of_a_frame_harms_nobody(agent: Agent) -> None:
    words = [
        start_cat(),
        frame_bytes(FrameType.DATA, 1, b"some input"),
        frame_bytes(FrameType.CREDIT, 1, b"\1\0\0\0"),
        frame_bytes(FrameType.CONTROL, 1, encode_u16(Verb.RESIZE) + encode_fields([(Tag.ROWS, 3), (Tag.COLS, 4)])),
        frame_bytes(FrameType.END, 1),
    ]
    whole = b"".join(words)
    before = agent.descriptors()
    for length in range(len(whole)):
        with agent.connect() as host:
            host.sock.sendall(whole[:length])
    watcher = agent.connect()
    watcher.hello()
    watcher.kill("cat")
    watcher.call(Op.RELEASE, [(Tag.ID, "cat")])
    eventually(lambda: agent.descriptors() == before + 1, "the release of every descriptor")


def test_frames_may_come_byte_by_byte(host: Connection) -> None:
    whole = start_cat() + frame_bytes(FrameType.DATA, 1, b"drip") + frame_bytes(FrameType.END, 1)
    for byte in whole:
        host.sock.sendall(bytes([byte]))
    answer = host.finish(1)
    assert (answer.stdout, answer.exit_code) == (b"drip", 0)


def test_garbage_is_refused_or_waited_for(agent: Agent) -> None:
    chance = random.Random(4)
    for _ in range(200):
        with agent.connect() as host:
            noise = chance.randbytes(chance.randrange(12, 400))
            host.sock.sendall(noise)
            if noise[3] or noise[2] > 4 or not 1 <= noise[8] <= 6 or noise[9] or noise[10] or noise[11]:
                assert host.refusal().errno == errno.EPROTO
    agent.connect().hello()


def test_nothing_is_sent_before_it_is_asked_for(agent: Agent) -> None:
    host = agent.connect()
    host.sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        host.receive()


def test_the_end_of_the_input_ends_the_connection(agent: Agent) -> None:
    host = agent.connect()
    host.hello()
    host.sock.shutdown(1)
    with pytest.raises(ClosedError):
        host.receive()
