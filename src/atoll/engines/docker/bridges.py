"""Streams through the engine: it executes a program inside, whose standard streams reach us over HTTP."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

from atoll.engines.docker.http import SLOW_S, Http, close

_PIECE = 256 << 10
_FRAME = struct.Struct(">BxxxL")
_STDOUT = 1
_PAUSE_S = 0.005
_ATTACHED = {"Detach": False, "Tty": False}


class Bridges:
    """Each bridge belongs to the event loop that it was made in, and ends with it."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._pumps: set[asyncio.Task[None]] = set()

    async def connect(self, container: str, program: str, path: str) -> socket.socket:
        """Raises RefusedError, EngineUnavailableError, OSError. Whether it answers shows only when it is spoken to."""
        exec_id = await self._prepare(container, [program, "connect", path], stdin=True)
        reader, writer = await self._http.hijack(f"/exec/{exec_id}/start", _ATTACHED)
        try:
            await self._await_start(exec_id)
        except BaseException:
            await close(writer)
            raise
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        task = asyncio.create_task(_pump(reader, writer, theirs), name=f"bridge to {container}")
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)
        return ours

    async def _await_start(self, exec_id: str) -> None:
        """Until the program runs. If it cannot, the engine would write its reason into the middle of our stream."""
        while True:
            state = await self._http.call("GET", f"/exec/{exec_id}/json")
            if state.get("Pid"):
                return
            if not state.get("Running") and state.get("ExitCode") is not None:
                raise ConnectionRefusedError("the container has ended, or does not run programs")
            await asyncio.sleep(_PAUSE_S)

    async def knock(self, container: str, program: str, path: str) -> bool:
        """Whether the agent listens: without input its `connect` only connects, and says how that went."""
        exec_id = await self._prepare(container, [program, "connect", path], stdin=False)
        await self._http.raw("POST", f"/exec/{exec_id}/start", body=_ATTACHED)
        answer = await self._http.call("GET", f"/exec/{exec_id}/json")
        return bool(answer.get("ExitCode") == 0)

    async def aclose(self) -> None:
        """Those of other event loops end with their loops."""
        loop = asyncio.get_running_loop()
        mine = [task for task in self._pumps if task.get_loop() is loop]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)

    async def _prepare(self, container: str, argv: list[str], *, stdin: bool) -> str:
        body = {
            "Cmd": argv,
            "User": "0:0",
            "AttachStdin": stdin,
            "AttachStdout": True,
            "AttachStderr": True,
            "WorkingDir": "/",
        }
        answer = await self._http.call("POST", f"/containers/{container}/exec", body=body, timeout_s=SLOW_S)
        return str(answer["Id"])


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: socket.socket) -> None:
    """Until either side ends, or the event loop does."""
    ways = [asyncio.ensure_future(_outwards(stream, writer)), asyncio.ensure_future(_inwards(reader, stream))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        stream.close()
        await close(writer)


async def _outwards(stream: socket.socket, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(stream, _PIECE):
            writer.write(data)
            await writer.drain()


async def _inwards(reader: asyncio.StreamReader, stream: socket.socket) -> None:
    """The engine marks each piece with the stream that it came from."""
    loop = asyncio.get_running_loop()
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            kind, left = _FRAME.unpack(await reader.readexactly(_FRAME.size))
            while left:
                data = await reader.read(min(left, _PIECE))
                if not data:
                    return
                left -= len(data)
                if kind == _STDOUT:
                    await loop.sock_sendall(stream, data)
