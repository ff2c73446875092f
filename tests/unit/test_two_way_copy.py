"""Bytes go both ways, and both ways come to an end."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from atoll.two_way_copy import SocketEnd, StreamEnd, copy_until_both_end, copy_until_one_ends

Four = tuple[socket.socket, socket.socket, socket.socket, socket.socket]


@pytest.fixture
def four() -> Iterator[Four]:
    """`one` is connected with `near`, `far` with `other`; what is tested connects `near` and `far`."""
    with ExitStack() as opened:
        pairs = [*socket.socketpair(), *socket.socketpair()]
        for each in pairs:
            each.setblocking(False)
            opened.enter_context(each)
        yield (pairs[0], pairs[1], pairs[2], pairs[3])


async def _all(sock: socket.socket) -> bytes:
    found = b""
    while data := await asyncio.get_running_loop().sock_recv(sock, 65_536):
        found += data
    return found


async def test_each_direction_passes_on_its_end_while_the_other_goes_on(four: Four) -> None:
    one, near, far, other = four
    loop, size = asyncio.get_running_loop(), 3 << 20
    copying = asyncio.create_task(copy_until_both_end(SocketEnd(near), SocketEnd(far)))
    sending = asyncio.create_task(loop.sock_sendall(one, b"x" * size))
    sending.add_done_callback(lambda _: one.shutdown(socket.SHUT_WR))
    assert len(await _all(other)) == size
    await loop.sock_sendall(other, b"late answer")
    other.shutdown(socket.SHUT_WR)
    assert await _all(one) == b"late answer"
    await copying


async def test_the_end_of_one_is_the_end_of_both_where_halves_cannot_be_closed(four: Four) -> None:
    one, near, far, other = four
    copying = asyncio.create_task(copy_until_one_ends(SocketEnd(near), SocketEnd(far)))
    await asyncio.get_running_loop().sock_sendall(other, b"answer")
    assert await asyncio.get_running_loop().sock_recv(one, 100) == b"answer"
    one.close()
    await copying


async def test_what_fails_ends_both_and_is_raised_unless_expected(four: Four) -> None:
    class Broken(SocketEnd):
        async def read(self) -> bytes:
            await asyncio.sleep(0)
            raise ValueError("broken")

    _, near, far, _ = four
    for copy in (copy_until_both_end, copy_until_one_ends):
        with pytest.raises(ValueError, match="broken"):
            await copy(SocketEnd(near), Broken(far))
    await copy_until_one_ends(SocketEnd(near), Broken(far), expected=(ValueError,))


async def test_a_connection_of_asyncio_is_an_end(four: Four) -> None:
    one, near, far, other = four
    reader, writer = await asyncio.open_connection(sock=near)
    try:
        copying = asyncio.create_task(copy_until_both_end(StreamEnd(reader, writer), SocketEnd(far)))
        await asyncio.get_running_loop().sock_sendall(one, b"question")
        one.shutdown(socket.SHUT_WR)
        assert await _all(other) == b"question"
        await asyncio.get_running_loop().sock_sendall(other, b"answer")
        other.close()
        assert await _all(one) == b"answer"
        await copying
    finally:
        writer.close()
        await writer.wait_closed()
