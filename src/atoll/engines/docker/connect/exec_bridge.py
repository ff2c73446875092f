"""Streams through the Docker API: a program is executed inside, and its standard streams arrive over HTTP."""

from __future__ import annotations

import asyncio
import socket
import struct

from atoll.engines.docker.api.exchange import close
from atoll.engines.docker.api.http import SLOW_S, Http
from atoll.two_way_copy import CopyTasks, SocketEnd, StreamEnd, copy_until_one_ends

_PIECE = 256 << 10
_FRAME = struct.Struct(">BxxxL")
_STDOUT = 1
_PAUSE_S = 0.005
_ATTACHED = {"Detach": False, "Tty": False}


class ExecBridges:
    """Bridges to agents. Each belongs to the event loop that it was created in and ends with it."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._copies = CopyTasks()

    async def connect(self, container: str, program: str, path: str) -> socket.socket:
        """Open a bridge. Whether the agent answers becomes known only when something is sent to it. Raises
        RefusedError, EngineUnavailableError, OSError."""
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
        self._copies.start(_carry(reader, writer, theirs), f"bridge to {container}")
        return ours

    async def _await_start(self, exec_id: str) -> None:
        """Wait until the program runs. If it could not be started, the Docker engine would write the reason into the
        middle of the stream."""
        while True:
            state = await self._http.call("GET", f"/exec/{exec_id}/json")
            if state.get("Pid"):
                return
            if not state.get("Running") and state.get("ExitCode") is not None:
                raise ConnectionRefusedError("the container has ended, or cannot run programs")
            await asyncio.sleep(_PAUSE_S)

    async def knock(self, container: str, program: str, path: str) -> bool:
        """Return whether the agent listens: without input, its `connect` only connects and exits with the outcome."""
        exec_id = await self._prepare(container, [program, "connect", path], stdin=False)
        await self._http.raw("POST", f"/exec/{exec_id}/start", body=_ATTACHED)
        answer = await self._http.call("GET", f"/exec/{exec_id}/json")
        return bool(answer.get("ExitCode") == 0)

    async def aclose(self) -> None:
        """Close the bridges of this event loop. Those of other event loops end with their loops."""
        await self._copies.aclose()

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


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: socket.socket) -> None:
    """Copy in both directions until either side or the event loop ends."""
    expected = (OSError, asyncio.IncompleteReadError)
    try:
        await copy_until_one_ends(SocketEnd(stream), _ExecEnd(reader, writer), expected=expected)
    finally:
        stream.close()
        await close(writer)


class _ExecEnd(StreamEnd):
    """The standard streams of a program. The Docker engine prefixes each piece with the number of its stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self._frames = reader
        self._kind = self._left = 0

    async def read(self) -> bytes:
        while True:
            while not self._left:
                self._kind, self._left = _FRAME.unpack(await self._frames.readexactly(_FRAME.size))
            data = await self._frames.read(min(self._left, _PIECE))
            self._left -= len(data)
            if self._kind == _STDOUT or not data:
                return data
