"""The byte stream to an agent, through a WebSocket of the server, as a socket."""

from __future__ import annotations

import contextlib
import socket

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from atoll import tracing
from atoll.engines.remote.rest_client import error_of
from atoll.errors import AgentUnreachableError
from atoll.two_way_copy import CopyTasks, SocketEnd, copy_until_one_ends

_MAX_BYTES = 8 << 20
_OPEN_S = 30.0
_CLOSE_S = 2.0


class Tunnels:
    """Streams to agents. Each is one end of a socket pair, and a task copies its bytes to the server and back."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._url = f"ws{url.removeprefix('http')}" if url.startswith("http") else url
        self._headers = headers
        self._copies = CopyTasks()

    async def open(self, sandbox_id: str) -> socket.socket:
        """Open a stream to an agent. Raises the server's error, or AgentUnreachableError."""
        address = f"{self._url}/api/v1/sandboxes/{sandbox_id}/agent"
        try:
            line = await connect(
                address,
                additional_headers={**self._headers, **tracing.headers()},
                compression=None,
                max_size=_MAX_BYTES,
                open_timeout=_OPEN_S,
                close_timeout=_CLOSE_S,
                ping_interval=20,
                ping_timeout=60,
            )
        except InvalidStatus as refusal:
            raise error_of(refusal.response.status_code, bytes(refusal.response.body or b"")) from refusal
        except (OSError, TimeoutError, WebSocketException) as error:
            raise AgentUnreachableError(f"the server cannot be reached: {error}") from error
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        self._copies.start(_carry(line, ours), f"tunnel to {sandbox_id}")
        return theirs

    async def aclose(self) -> None:
        await self._copies.aclose()


async def _carry(line: ClientConnection, ours: socket.socket) -> None:
    """Copy in both directions until either side ends, then close both."""
    try:
        await copy_until_one_ends(SocketEnd(ours), _LineEnd(line), expected=(OSError, WebSocketException))
    finally:
        ours.close()
        with contextlib.suppress(Exception):
            await line.close()


class _LineEnd:
    """A WebSocket, whose messages are the bytes of one stream. Reading past its end raises an exception."""

    def __init__(self, line: ClientConnection) -> None:
        self._line = line

    async def read(self) -> bytes:
        while not (data := await self._line.recv(decode=False)):  # an empty message is not the end
            pass
        return data

    async def write(self, data: bytes) -> None:
        await self._line.send(data)

    async def write_eof(self) -> None:
        await self._line.close()
