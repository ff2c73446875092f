"""An agent that breaks the protocol: a clear error for everyone, no hang, no growing memory."""

from __future__ import annotations

import asyncio
import errno
import random
import struct
import tracemalloc
from collections.abc import Awaitable, Callable

import pytest

from atoll.errors import AgentUnreachableError, ProtocolError, SandboxError, SandboxResourceError
from atoll.guest import Guest, StartRequest
from atoll.guest.connection import Connection
from atoll.guest.file_records import DIRECTORY, FILE, encode_record
from atoll.guest.frames import (
    HEADER,
    MAX_PAYLOAD,
    WINDOW,
    EventKind,
    FrameType,
    Op,
    Tag,
    encode_fields,
    encode_frame,
    encode_u16,
)
from unit.guest.conftest import Scripted
from unit.guest.scripted import INSTANCE, Peer, eventually

pytestmark = pytest.mark.timeout(60)

RUN = StartRequest(b"1", shell="x")


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(HEADER.pack(MAX_PAYLOAD + 1, 2, FrameType.DATA, 1, 0), id="one byte too large"),
        pytest.param(HEADER.pack(0xFFFFFFFF, 2, FrameType.DATA, 1, 0), id="four gigabytes"),
        pytest.param(HEADER.pack(0, 2, 9, 0, 0), id="unknown type"),
        pytest.param(HEADER.pack(0, 2, 0, 0, 0), id="type zero"),
        pytest.param(HEADER.pack(0, 2, FrameType.OPEN, 0, 0), id="open from the agent"),
        pytest.param(HEADER.pack(0, 2, FrameType.CONTROL, 0, 0), id="control from the agent"),
        pytest.param(HEADER.pack(0, 2, FrameType.CLOSE, 0, 0), id="close from the agent"),
        pytest.param(HEADER.pack(0, 3, FrameType.END, 0, 0), id="a stream that was never opened"),
        pytest.param(HEADER.pack(0, 0xFFFFFFFF, FrameType.DATA, 0, 0), id="the last stream number"),
        pytest.param(HEADER.pack(0, 1, FrameType.END, 0, 0), id="a second end"),
        pytest.param(HEADER.pack(0, 0, FrameType.END, 0, 0), id="an end of the connection itself"),
        pytest.param(encode_frame(FrameType.DATA, 2, b"x", channel=4), id="unknown channel"),
        pytest.param(encode_frame(FrameType.DATA, 2, b"x", channel=0), id="output on the input channel"),
        pytest.param(encode_frame(FrameType.END, 2, channel=1), id="channel without data"),
        pytest.param(HEADER.pack(0, 2, FrameType.END, 0, 1), id="reserved bytes"),
        pytest.param(encode_frame(FrameType.END, 2), id="an end without a cause"),
        pytest.param(encode_frame(FrameType.END, 2, b"\1"), id="truncated fields"),
        pytest.param(encode_frame(FrameType.END, 2, struct.pack("<HI", 21, 99)), id="a field longer than its frame"),
        pytest.param(encode_frame(FrameType.END, 2, encode_fields([(Tag.CAUSE, 77)])), id="unknown cause"),
        pytest.param(
            encode_frame(FrameType.END, 2, encode_fields([(Tag.CAUSE, 1), (Tag.EXIT_CODE, 2**63)])), id="huge exit code"
        ),
        pytest.param(encode_frame(FrameType.END, 2, encode_fields([(Tag.CAUSE, b"1")])), id="a number of one byte"),
        pytest.param(encode_frame(FrameType.ERROR, 2), id="an error without a number"),
        pytest.param(encode_frame(FrameType.EVENT, 2), id="an event without a kind"),
        pytest.param(encode_frame(FrameType.EVENT, 2, encode_u16(999)), id="unknown event"),
        pytest.param(encode_frame(FrameType.EVENT, 2, encode_u16(EventKind.STARTED)), id="an event not asked for"),
        pytest.param(encode_frame(FrameType.CREDIT, 2, b"\1"), id="malformed credit"),
        pytest.param(encode_frame(FrameType.CREDIT, 2, b"\xff" * 4) * 2, id="absurd credit"),
    ],
)
async def test_a_frame_against_the_protocol_fails_the_whole_connection(scripted: Scripted, frame: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.opened(Op.START)
        await peer.send(frame)
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    connection = await guest.connection()
    with pytest.raises(ProtocolError):
        await guest.processes.run(RUN, limit_bytes=100)
    assert connection.closed


async def test_every_other_stream_learns_of_the_violation(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        for _ in range(3):
            await peer.opened(Op.STATS)
        await peer.end(99)
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    await guest.connection()
    results = await asyncio.gather(*(guest.stats() for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [ProtocolError] * 3


async def test_a_refusal_of_the_connection_is_told_with_its_reason(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.opened(Op.STATS)
        await peer.error(0, errno.EPROTO, "too many\x1b streams")

    guest = Guest(scripted(script).connect)
    with pytest.raises(ProtocolError, match="rejected a frame: too many\ufffd streams"):
        await guest.stats()


@pytest.mark.parametrize("closed_by_us", [False, True])
async def test_output_beyond_the_credit_is_a_violation(scripted: Scripted, closed_by_us: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.START)
        await peer.event(stream, EventKind.STARTED, [(Tag.PID, 1)])
        if closed_by_us:
            await peer.expect(FrameType.CLOSE)
        while True:
            await peer.data(stream, bytes(65_536), 1)

    guest = Guest(scripted(script).connect)
    process = await guest.processes.start(RUN)
    waiting = asyncio.create_task(guest.connection())
    if closed_by_us:
        process.detach()
    connection = await waiting
    await eventually(lambda: connection.closed)
    if not closed_by_us:
        with pytest.raises(ProtocolError, match="more data than it was allowed"):
            async for _ in process:
                pass


async def test_output_without_an_end_is_kept_within_the_limit(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.START)
        allowed = WINDOW
        for _ in range(400):
            while allowed < 65_536:
                allowed += int.from_bytes((await peer.expect(FrameType.CREDIT)).payload, "little")
            await peer.data(stream, bytes(65_536), 1)
            allowed -= 65_536
        await peer.exit(stream)
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    await guest.connection()
    tracemalloc.start()
    completed = await guest.processes.run(RUN, limit_bytes=10_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert completed.stdout.total == 400 * 65_536
    assert len(completed.stdout.value()) < 10_100
    assert peak < 3 << 20
    await guest.aclose()


async def test_a_flood_of_tiny_pieces_costs_little_more_than_its_bytes(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.START)
        await peer.event(stream, EventKind.STARTED, [(Tag.PID, 1)])
        one = encode_frame(FrameType.DATA, stream, b"x", 1)
        for _ in range(WINDOW // 1024):
            await peer.send(one * 1024)
        await peer.exit(stream)
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    process = await guest.processes.start(RUN)
    tracemalloc.start()
    await eventually(lambda: process._inbox.over)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    assert sum([len(output.data) async for output in process]) == WINDOW
    await guest.aclose()


async def test_a_flood_of_frames_leaves_the_event_loop_to_others(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.START)
        await peer.send(encode_frame(FrameType.DATA, stream, b"", 1) * 40_000)
        await peer.exit(stream)
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    run = asyncio.create_task(guest.processes.run(RUN, limit_bytes=10))
    turns = 0
    while not run.done():
        await asyncio.sleep(0)
        turns += 1
    await run
    assert turns >= 40_000 // 1024
    await guest.aclose()


async def test_silence_is_an_unreachable_agent(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.until_closed()

    with pytest.raises(AgentUnreachableError, match=r"did not answer within 0\.05 s"):
        await Connection.open(await scripted(script).connect(), timeout_s=0.05)


@pytest.mark.parametrize(
    "answer",
    [
        [(Tag.VERSION, 2), (Tag.INSTANCE, INSTANCE)],
        [(Tag.VERSION, 1), (Tag.INSTANCE, b"short")],
        [(Tag.VERSION, 1)],
        [],
    ],
)
async def test_a_wrong_greeting_is_refused(scripted: Scripted, answer: list[tuple[Tag, int | bytes | str]]) -> None:
    async def script(peer: Peer) -> None:
        await peer.end(await peer.opened(Op.HELLO), answer)
        await peer.until_closed()

    with pytest.raises(ProtocolError):
        await Connection.open(await scripted(script).connect())


async def test_a_connection_that_is_cut_in_a_frame_is_lost(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.START)
        await peer.send(encode_frame(FrameType.DATA, stream, bytes(5000), 1)[:-1])

    guest = Guest(scripted(script).connect)
    with pytest.raises(AgentUnreachableError, match="closed the connection"):
        await guest.processes.run(RUN, limit_bytes=10)


async def test_an_agent_that_reads_nothing_cannot_fill_our_memory(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await asyncio.sleep(60)

    guest = Guest(scripted(script).connect)
    request = StartRequest(b"1", argv=["x", "y" * 131_000])
    runs = [asyncio.create_task(guest.processes.run(request, limit_bytes=1)) for _ in range(700)]
    results = await asyncio.gather(*runs, return_exceptions=True)
    assert {type(result) for result in results} == {AgentUnreachableError}


async def test_the_agent_cannot_be_asked_more_than_it_may_be(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    await guest.connection()
    tasks = [asyncio.create_task(guest.stats()) for _ in range(4097)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(tasks[-1].exception(), SandboxResourceError)
    await guest.aclose()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_attach_that_starts_before_what_was_asked_for_is_a_violation(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.event(await peer.opened(Op.ATTACH), EventKind.ATTACHED, [(Tag.OFFSET_1, 3)])
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    with pytest.raises(ProtocolError, match="before the requested offset"):
        await guest.processes.attach(b"1", (4, 0, 0))
    await guest.aclose()


@pytest.mark.parametrize("kind", [EventKind.STARTED, EventKind.READY, 999])
async def test_an_event_that_is_not_due_fails_the_connection(scripted: Scripted, kind: int) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.START)
        await peer.event(stream, EventKind.STARTED, [(Tag.PID, 1)])
        await peer.event(stream, kind)
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    process = await guest.processes.start(RUN)
    with pytest.raises(ProtocolError, match="unexpected"):
        await process.wait()


Use = Callable[[Guest], Awaitable[object]]


async def _walk(guest: Guest) -> object:
    return [info async for info in guest.files.walk("d")]


async def _watch(guest: Guest) -> object:
    async with guest.files.watch("d") as events:
        return [event async for event in events]


@pytest.mark.parametrize(
    ("op", "use", "data"),
    [
        (Op.LIST, lambda guest: guest.files.list("d"), encode_record(FILE, b"../x", 0, 0, 0)),
        (Op.LIST, lambda guest: guest.files.list("d"), encode_record(FILE, b"a/b", 0, 0, 0)),
        (Op.LIST, lambda guest: guest.files.list("d"), encode_record(FILE, b"", 0, 0, 0)),
        (Op.LIST, lambda guest: guest.files.list("d"), encode_record(FILE, b"abc", 0, 0, 0)[:-1]),
        (Op.WALK, _walk, encode_record(DIRECTORY, b"a/../../b", 0, 0, 0)),
        (Op.WALK, _walk, encode_record(DIRECTORY, b"/etc", 0, 0, 0)),
        (Op.WATCH, _watch, struct.pack("<BBH", 9, 0, 1) + b"a"),
        (Op.WATCH, _watch, struct.pack("<BBH", 1, 0, 4) + b"../a"),
        (Op.WATCH, _watch, struct.pack("<BBH", 1, 2, 1) + b"a"),
        (Op.WATCH, _watch, struct.pack("<BBH", 1, 0, 0xFFFF)),
        (Op.PROCESSES, lambda guest: guest.processes.list(), b"\5\0abc"),
        (Op.READ, lambda guest: guest.files.read("x", length=3), b"more"),
    ],
)
async def test_a_lie_about_files_fails_the_connection(scripted: Scripted, op: Op, use: Use, data: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(op)
        if op is Op.WATCH:
            await peer.event(stream, EventKind.READY)
        if op is Op.READ:
            await peer.event(stream, EventKind.FILE, [(Tag.SIZE, 3)])
        await peer.data(stream, data)
        if op is not Op.WATCH:
            await peer.end(stream)
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    connection = await guest.connection()
    with pytest.raises(ProtocolError):
        await use(guest)
    assert connection.closed


async def test_a_directory_without_an_end_is_refused_at_the_limit(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.LIST)
        for number in range(2000):
            await peer.data(stream, encode_record(FILE, b"%d" % number, 0, 0, 0))
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    with pytest.raises(SandboxResourceError, match="more than 1000 entries"):
        await guest.files.list("d", limit=1000)
    await guest.aclose()


@pytest.mark.parametrize("announced", [10, 2**63])
async def test_a_file_without_an_end_is_refused_at_the_limit(scripted: Scripted, announced: int) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.READ)
        await peer.event(stream, EventKind.FILE, [(Tag.SIZE, announced)])
        await peer.data(stream, bytes(WINDOW))
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    with pytest.raises(OSError, match="more than 100000 bytes: 'x'") as caught:
        await guest.files.read("x", limit_bytes=100_000)
    assert caught.value.errno == errno.EFBIG
    await guest.aclose()


async def test_random_bytes_are_refused_and_never_hang(scripted: Scripted) -> None:
    source = random.Random(6)

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.opened(Op.START)
        kind, length = source.choice([2, 3, 4, 7, 8, source.randrange(256)]), source.randrange(64)
        header = HEADER.pack(length, source.choice([2, 2, 2, 0, 1]), kind, source.randrange(5), 0)
        await peer.send(header + source.randbytes(length) + source.randbytes(500))

    for _ in range(200):
        guest = Guest(scripted(script).connect)
        with pytest.raises((SandboxError, OSError)):
            await guest.processes.run(RUN, limit_bytes=100)
        await guest.aclose()
