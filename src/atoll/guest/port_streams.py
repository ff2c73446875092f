"""Connections to ports and Unix sockets inside a sandbox, which work even if the sandbox has no network, and
whether an HTTP server answers there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from atoll.errors import ProtocolError
from atoll.guest.frames import EventKind, Fields, Op, Tag, encode_fields
from atoll.guest.inbox import Inbox

if TYPE_CHECKING:
    from atoll.guest.guest import Guest

_LAST_PORT = 65_535


class Ports:
    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    async def connect(self, port: int | None = None, path: str | None = None) -> AsyncPortStream:
        """Connect to a TCP port on the sandbox's loopback or to a Unix socket. Raises ConnectionRefusedError."""
        if (port is None) == (path is None):
            raise ValueError("give either a port or a path")
        if port is not None and not 1 <= port <= _LAST_PORT:
            raise ValueError(f"{port} is not a port")
        where: tuple[Tag, int | str] = (Tag.PATH, path) if path is not None else (Tag.PORT, port or 0)
        inbox = _PortInbox(events=(EventKind.CONNECTED, EventKind.EOF))
        inbox.open(await self._guest.connection(), Op.CONNECT, encode_fields([where]))
        try:
            if not await inbox.event(EventKind.CONNECTED):
                raise ProtocolError("the agent ended a connection that it had not made")
        except OSError as error:
            raise OSError(error.errno, error.strerror, path or f"port {port}") from None
        except BaseException:
            inbox.close()
            raise
        inbox.stream.live = True
        return self.new_stream(inbox)

    def new_stream(self, inbox: Inbox) -> AsyncPortStream:
        """Create the stream that `connect` returns. Subclasses that count the uses of a sandbox override this."""
        return AsyncPortStream(inbox)


class AsyncPortStream:
    """A connected byte stream. Reading and writing may happen at the same time."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._rest = b""

    async def read(self, n: int = 65_536) -> bytes:
        """Return at most `n` bytes as soon as some are available, or b"" at the end."""
        if not self._rest:
            piece = await self._inbox.take()
            self._rest = piece[1] if piece is not None else b""
        data, self._rest = self._rest[:n], self._rest[n:]
        return data

    async def write(self, data: bytes) -> None:
        await self._inbox.stream.alive()
        await self._inbox.stream.send_data(data)

    async def write_eof(self) -> None:
        """Close the writing side. Reading can continue."""
        self._inbox.stream.end()

    async def aclose(self) -> None:
        """Close the connection. May be repeated."""
        self._inbox.close()

    async def __aenter__(self) -> AsyncPortStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


_MAX_LINE = 4096
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: |\r|\n)")


class PortConnection(Protocol):
    """The part of a `AsyncPortStream` that `http_status` uses."""

    async def read(self, size: int, /) -> bytes: ...

    async def write(self, data: bytes, /) -> None: ...


async def http_status(connection: PortConnection, port: int, path: str) -> int | None:
    """Send one HTTP request and read only the status line of the answer.

    Return the status, or None if the answer is not HTTP. The caller limits the time.
    """
    request = f"GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    await connection.write(request.encode())
    line = b""
    while len(line) < _MAX_LINE and b"\n" not in line:
        data = await connection.read(_MAX_LINE)
        if not data:
            break
        line += data
    match = _STATUS_LINE.match(line)
    return int(match[1]) if match is not None else None


class _PortInbox(Inbox):
    def on_event(self, kind: int, fields: Fields) -> None:
        super().on_event(kind, fields)
        self.eof = kind == EventKind.EOF
