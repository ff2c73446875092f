"""One connection: answers reach who asked, streams flow independently, and losing it is told to everyone."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import AsyncIterator

import pytest

from atoll.guest import Guest, StartRequest
from atoll.guest.connection import Connection
from atoll.guest.frames import WINDOW, EventKind, FrameType, Op, Tag, encode_fields, encode_frame, encode_u16
from unit.guest.conftest import Scripted
from unit.guest.scripted import INSTANCE, Peer, hold

pytestmark = pytest.mark.timeout(60)


async def test_a_greeting_tells_who_the_agent_is(scripted: Scripted) -> None:
    connection = await Connection.open(await scripted(hold).connect())
    assert connection.instance == INSTANCE
    assert connection.loop is asyncio.get_running_loop()
    await connection.aclose()
    await connection.aclose()
    assert connection.closed


async def test_frames_arrive_whole_however_the_bytes_are_divided(scripted: Scripted) -> None:
    source = random.Random(4)
    payload = source.randbytes(600_000)

    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.READ)
        pieces = [payload[i : i + 7000] for i in range(0, len(payload), 7000)]
        frames = encode_frame(
            FrameType.EVENT, stream, encode_u16(EventKind.FILE) + encode_fields([(Tag.SIZE, 600_000)])
        )
        frames += b"".join(encode_frame(FrameType.DATA, stream, piece) for piece in pieces)
        frames += encode_frame(FrameType.END, stream)
        position = 0
        while position < len(frames):
            size = source.choice([1, 3, 11, 12, 13, 5000, 70_000])
            await peer.send(frames[position : position + size])
            position += size
            if source.random() < 0.2:
                await asyncio.sleep(0)
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    assert await guest.files.read("x") == payload
    await guest.aclose()


async def test_answers_may_come_in_any_order(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        streams = [await peer.opened(Op.STAT) for _ in range(3)]
        for stream in reversed(streams):
            await peer.error(stream, errno.ENOENT, f"stream {stream}")
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    results = await asyncio.gather(*(guest.files.stat(name) for name in "abc"), return_exceptions=True)
    assert [str(result) for result in results] == [
        "[Errno 2] stream 2: 'a'",
        "[Errno 2] stream 3: 'b'",
        "[Errno 2] stream 4: 'c'",
    ]
    await guest.aclose()


async def test_cancelling_a_request_closes_its_stream_and_a_late_answer_is_fine(scripted: Scripted) -> None:
    closed = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.STATS)
        assert (await peer.expect(FrameType.CLOSE)).stream == stream
        closed.set()
        await peer.error(stream, errno.ECANCELED, "canceled")
        await peer.opened(Op.HELLO)
        await peer.end(stream + 1, [(Tag.PID, 1), (Tag.UPTIME_NS, 0), (Tag.INSTANCE, INSTANCE)])
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    await guest.connection()
    task = asyncio.create_task(guest.stats())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await closed.wait()
    assert (await guest.hello()).pid == 1
    await guest.aclose()


async def test_data_waits_for_credit_and_goes_on_with_it(scripted: Scripted) -> None:
    data = random.Random(5).randbytes(3 * WINDOW + 17)
    received = bytearray()

    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.WRITE)
        allowed = WINDOW
        while (frame := await peer.frame()).type == FrameType.DATA:
            received.extend(frame.payload)
            assert len(received) <= allowed
            if len(received) == allowed:
                await peer.credit(stream, 100_000)
                allowed += 100_000
        assert frame.type == FrameType.END
        await peer.end(stream, [(Tag.SIZE, len(received))])
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    assert await guest.files.write("x", data) == len(data)
    assert received == data
    await guest.aclose()


async def test_an_upload_that_is_refused_early_ends_with_the_reason(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.error(await peer.opened(Op.WRITE), errno.ENOSPC, "disk is full")
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    with pytest.raises(OSError, match="disk is full: 'x'") as caught:
        await guest.files.write("x", bytes(10 * WINDOW))
    assert caught.value.errno == errno.ENOSPC
    await guest.aclose()


async def test_a_failing_source_of_data_closes_the_stream_and_is_raised(scripted: Scripted) -> None:
    closed = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.opened(Op.WRITE)
        await peer.expect(FrameType.DATA)
        await peer.expect(FrameType.CLOSE)
        closed.set()
        await peer.until_closed()

    async def source() -> AsyncIterator[bytes]:
        yield b"half"
        raise BrokenPipeError("the source broke")

    guest = Guest(scripted(script).connect)
    with pytest.raises(BrokenPipeError, match="the source broke"):
        await guest.files.write_stream("x", source())
    await closed.wait()
    await guest.aclose()


async def test_output_is_asked_for_only_as_the_consumer_takes_it(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.START)
        await peer.event(stream, EventKind.STARTED, [(Tag.PID, 9)])
        await peer.data(stream, bytes(WINDOW), 1)
        credit = await peer.expect(FrameType.CREDIT)
        await peer.data(stream, bytes(int.from_bytes(credit.payload, "little")), 2)
        await peer.exit(stream, 3)
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    process = await guest.processes.start(StartRequest(b"1", shell="x"))
    assert process.pid == 9
    sizes = {1: 0, 2: 0}
    async for channel, data in process:
        sizes[channel] += len(data)
    assert sizes[1] == WINDOW
    assert process.offsets == [WINDOW, sizes[2], 0]
    assert (await process.wait()).exit_code == 3
    await guest.aclose()


@pytest.mark.parametrize("iterate_first", [False, True])
async def test_waiting_throws_away_what_nobody_reads(scripted: Scripted, iterate_first: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.START)
        await peer.event(stream, EventKind.STARTED, [(Tag.PID, 9)])
        allowed = sent = WINDOW
        await peer.data(stream, bytes(WINDOW), 1)
        while sent < 5 * WINDOW:
            allowed += int.from_bytes((await peer.expect(FrameType.CREDIT)).payload, "little")
            await peer.data(stream, bytes(allowed - sent), 1)
            sent = allowed
        await peer.exit(stream)
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    process = await guest.processes.start(StartRequest(b"1", shell="x"))
    if iterate_first:
        async for _ in process:
            break
    assert (await process.wait()).exit_code == 0
    assert process.offsets[0] >= 5 * WINDOW
    await guest.aclose()


async def test_cancelling_a_run_kills_the_process(scripted: Scripted) -> None:
    killed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    started = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.START)
        started.set()
        await peer.expect(FrameType.CLOSE)
        kill = await peer.expect(FrameType.OPEN)
        await peer.error(stream, errno.ECANCELED, "canceled")
        await peer.end(kill.stream)
        killed.set_result(kill.payload)
        await peer.until_closed()

    guest = Guest(scripted(script).connect)
    task = asyncio.create_task(guest.processes.run(StartRequest(b"me", shell="x"), limit_bytes=10))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await killed)[:2] == encode_u16(Op.KILL)
    assert encode_fields([(Tag.ID, b"me"), (Tag.SIGNAL, 9)]) in await killed
    await guest.aclose()


async def test_a_failing_callback_reaches_its_caller_and_nobody_else(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        await peer.data(await peer.opened(Op.START), b"hello", 1)
        await peer.until_closed()

    def callback(channel: int, data: bytes) -> None:
        raise LookupError(f"{channel} {data!r}")

    guest = Guest(scripted(script).connect)
    with pytest.raises(LookupError, match="1 b'hello'"):
        await guest.processes.run(StartRequest(b"1", shell="x"), limit_bytes=10, on_output=callback)
    assert not (await guest.connection()).closed
    await guest.aclose()
