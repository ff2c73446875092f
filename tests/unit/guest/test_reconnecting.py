"""Losing a connection is told to everyone, and the next request connects again."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from atoll.errors import AgentUnreachableError
from atoll.guest import Guest, StartRequest
from atoll.guest.frames import EventKind, Op, Tag
from unit.guest.conftest import Scripted
from unit.guest.scripted import Peer, hold

pytestmark = pytest.mark.timeout(60)


async def test_a_lost_connection_reaches_every_stream_and_the_next_request_connects_again(scripted: Scripted) -> None:
    async def dies(peer: Peer) -> None:
        await peer.greet()
        await peer.opened(Op.START)
        await peer.opened(Op.STATS)

    agent = scripted(dies, hold)
    guest = Guest(agent.connect)
    results = await asyncio.gather(
        guest.processes.run(StartRequest(b"1", shell="x"), limit_bytes=10),
        guest.stats(),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [AgentUnreachableError] * 2
    assert results[0] is not results[1]
    first = guest._connection
    assert await guest.connection() is not first
    assert agent.connections == 2
    await guest.aclose()


async def test_what_came_before_the_connection_was_lost_is_still_delivered(scripted: Scripted) -> None:
    async def script(peer: Peer) -> None:
        await peer.greet()
        stream = await peer.opened(Op.ATTACH)
        await peer.event(stream, EventKind.ATTACHED, [(Tag.PID, 9), (Tag.OFFSET_1, 25), (Tag.OFFSET_2, 3)])
        await peer.data(stream, b"last words", 1)

    guest = Guest(scripted(script).connect)
    process = await guest.processes.attach(b"1", (20, 3, 0))
    assert (process.dropped, process.offsets) == (5, [25, 3, 0])
    seen = []

    async def consume() -> None:
        async for output in process:
            seen.append(output.data)

    with pytest.raises(AgentUnreachableError):
        await consume()
    assert seen == [b"last words"]
    assert process.offsets == [35, 3, 0]
    with pytest.raises(AgentUnreachableError):
        await process.wait()
    with pytest.raises(AgentUnreachableError):
        await process.send_stdin(b"x")


async def test_concurrent_first_requests_share_one_connection(scripted: Scripted) -> None:
    agent = scripted(hold)
    guest = Guest(agent.connect)
    tasks = [asyncio.create_task(guest.connection()) for _ in range(5)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    connections = {await task for task in tasks[1:]}
    assert len(connections) == 1
    assert agent.connections == 1
    await guest.aclose()


async def test_an_engine_that_cannot_connect_is_an_unreachable_agent() -> None:
    async def refused() -> socket.socket:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    async def hangs() -> socket.socket:
        await asyncio.sleep(60)
        raise AssertionError

    with pytest.raises(AgentUnreachableError, match="cannot reach the agent: Connection refused"):
        await Guest(refused).hello()
    with pytest.raises(AgentUnreachableError, match="cannot reach the agent"):
        await Guest(hangs, connect_timeout_s=0.05).hello()
    guest = Guest(hangs)
    waiting = asyncio.create_task(guest.hello())
    await asyncio.sleep(0)
    await guest.aclose()
    with pytest.raises(AgentUnreachableError, match="was closed"):
        await waiting


def test_a_guest_moves_from_one_event_loop_to_the_next() -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen(8)

    async def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, listener.getsockname())
        return sock

    async def serve_one() -> Peer:
        peer = Peer((await asyncio.to_thread(listener.accept))[0])
        await peer.greet()
        return peer

    async def use() -> Peer:
        peer, connection = await asyncio.gather(serve_one(), guest.connection())
        assert connection.loop is asyncio.get_running_loop()
        return peer

    guest = Guest(connect)
    closed_loop = asyncio.new_event_loop()
    first = closed_loop.run_until_complete(use())
    closed_loop.run_until_complete(closed_loop.shutdown_default_executor())
    closed_loop.close()
    open_loop = asyncio.new_event_loop()
    second = open_loop.run_until_complete(use())

    async def last() -> None:
        third = await use()
        assert await first.until_closed() == b""
        assert await second.until_closed() == b""
        await guest.aclose()
        assert await third.until_closed() == b""
        for peer in (first, second, third):
            peer.close()

    asyncio.run(last())
    open_loop.run_until_complete(open_loop.shutdown_default_executor())
    open_loop.close()
    listener.close()


async def test_an_attempt_from_before_a_new_start_fails_nobody_who_waits_for_that(scripted: Scripted) -> None:
    peer, started, attempts = scripted(hold), asyncio.Event(), 0

    async def connect() -> socket.socket:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            await started.wait()
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return await peer.connect()

    guest = Guest(connect)
    early = asyncio.create_task(guest.connection())
    await asyncio.sleep(0)
    waiting = asyncio.create_task(guest.renewed())
    await asyncio.sleep(0)
    started.set()
    with pytest.raises(AgentUnreachableError):
        await early
    await waiting
    assert attempts == 2
    await guest.aclose()


async def test_an_agent_that_dies_before_its_first_answer_is_followed_by_the_next(scripted: Scripted) -> None:
    async def killed(peer: Peer) -> None:
        await peer.opened(Op.HELLO)

    agent = scripted(killed, hold)
    guest = Guest(agent.connect)
    await guest.present(10)
    assert agent.connections == 2
    await guest.aclose()


async def test_an_agent_that_always_dies_before_its_first_answer_is_unreachable(scripted: Scripted) -> None:
    async def killed(peer: Peer) -> None:
        await peer.opened(Op.HELLO)

    agent = scripted(killed, killed)
    with pytest.raises(AgentUnreachableError, match="closed the connection"):
        await Guest(agent.connect).present(10)
    assert agent.connections == 2
