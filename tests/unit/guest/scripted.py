"""The other end of a connection, told by each test what to say. It plays agents that no honest program would be."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from atoll.guest.frames import (
    HEADER,
    EventKind,
    FrameType,
    Op,
    Tag,
    encode_fields,
    encode_frame,
    encode_u16,
    encode_u32,
)

INSTANCE = bytes(range(16))

Value = int | bytes | str


async def eventually(condition: Callable[[], object]) -> None:
    """For what nobody tells when it happens. The test's own time limit is the limit."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


class Frame(NamedTuple):
    type: int
    stream: int
    channel: int
    payload: bytes


class Peer:
    """One accepted connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._received = b""
        self.sent = 0

    async def frame(self) -> Frame:
        header = await self._exactly(HEADER.size)
        length, stream, kind, channel, reserved = HEADER.unpack(header)
        assert reserved == 0
        return Frame(kind, stream, channel, await self._exactly(length))

    async def expect(self, kind: FrameType) -> Frame:
        """The next frame of this type; credit that comes before is passed over."""
        while (frame := await self.frame()).type == FrameType.CREDIT and kind != FrameType.CREDIT:
            pass
        assert frame.type == kind, frame
        return frame

    async def opened(self, op: Op) -> int:
        """Wait for a request; returns its stream."""
        frame = await self.expect(FrameType.OPEN)
        assert frame.payload[:2] == encode_u16(op), frame
        return frame.stream

    async def greet(self) -> None:
        stream = await self.opened(Op.HELLO)
        await self.end(
            stream, [(Tag.VERSION, 1), (Tag.INSTANCE, INSTANCE), (Tag.PID, 1), (Tag.UPTIME_NS, 5_000_000_000)]
        )

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)
        self.sent += len(data)

    async def data(self, stream: int, data: bytes, channel: int = 0) -> None:
        await self.send(encode_frame(FrameType.DATA, stream, data, channel))

    async def event(self, stream: int, kind: EventKind | int, fields: list[tuple[Tag, Value]] | None = None) -> None:
        await self.send(encode_frame(FrameType.EVENT, stream, encode_u16(kind) + encode_fields(fields or [])))

    async def end(self, stream: int, fields: list[tuple[Tag, Value]] | None = None) -> None:
        await self.send(encode_frame(FrameType.END, stream, encode_fields(fields or [])))

    async def exit(self, stream: int, code: int = 0) -> None:
        await self.end(stream, [(Tag.CAUSE, 1), (Tag.EXIT_CODE, code), (Tag.PID, 7)])

    async def error(self, stream: int, number: int, message: str | bytes) -> None:
        await self.send(
            encode_frame(FrameType.ERROR, stream, encode_fields([(Tag.ERRNO, number), (Tag.MESSAGE, message)]))
        )

    async def credit(self, stream: int, size: int) -> None:
        await self.send(encode_frame(FrameType.CREDIT, stream, encode_u32(size)))

    async def until_closed(self) -> bytes:
        """Everything that comes until the host closes the connection."""
        while await self._more():
            pass
        return self._received

    def close(self) -> None:
        self._sock.close()

    async def _exactly(self, size: int) -> bytes:
        while len(self._received) < size:
            if not await self._more():
                raise ConnectionResetError("the host closed the connection")
        data, self._received = self._received[:size], self._received[size:]
        return data

    async def _more(self) -> bool:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._sock, 1 << 20)
        except ConnectionError:
            return False
        self._received += data
        return bool(data)


Script = Callable[[Peer], Awaitable[None]]


class ScriptedAgent:
    """Plays a script on each connection, in order; the last one again and again."""

    def __init__(self, *scripts: Script) -> None:
        self.connections = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._scripts = scripts

    async def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        script = self._scripts[min(self.connections, len(self._scripts) - 1)]
        self.connections += 1
        self.tasks.append(asyncio.create_task(self._play(script, Peer(theirs))))
        return ours

    async def finish(self) -> None:
        """End all scripts, and raise what went wrong in one of them."""
        for task in self.tasks:
            task.cancel()
        for result in await asyncio.gather(*self.tasks, return_exceptions=True):
            # That the host hangs up in the middle of a script is what most of them are written for.
            if isinstance(result, Exception) and not isinstance(result, ConnectionError):
                raise result

    async def _play(self, script: Script, peer: Peer) -> None:
        try:
            await script(peer)
        finally:
            peer.close()


async def hold(peer: Peer) -> None:
    """Greets, and then only listens."""
    await peer.greet()
    await peer.until_closed()
