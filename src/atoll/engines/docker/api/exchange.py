"""One request to a Docker engine and its answer, on a connection of their own. h11 does the framing of HTTP/1.1.

The head of an answer is read up to its end and no further: what follows an upgrade is not HTTP, and stays in the reader
for whoever takes the connection over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

import h11

from atoll.errors import EngineError

MAX_HEAD = 64 << 10
MAX_BODY = 64 << 20
_MAX_INTERIM = 16
"""Answers before the final one: "100 Continue" and the like."""
_READ = 64 << 10
_CONTINUE, _SWITCHING = 100, 101


class BrokenOffError(Exception):
    """The Docker engine closed the connection in the middle of its answer, or its answer makes no sense. This exception
    never leaves the package."""


class Exchange:
    """Methods raise BrokenOffError, h11.ProtocolError, asyncio.IncompleteReadError and asyncio.LimitOverrunError for an
    answer that is broken or too long."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """`reader` has the limit MAX_HEAD."""
        self.reader, self.writer = reader, writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self._has_end = True

    def ask(self, method: str, target: str, headers: Mapping[str, str], content: bytes | None = None) -> None:
        """Write a request. Without `content`, its body is sent later. Raises EngineError if a name in it does not fit
        into a request."""
        try:
            head = self._http.send(h11.Request(method=method, target=target, headers=list(headers.items())))
        except (h11.LocalProtocolError, UnicodeEncodeError) as error:
            raise EngineError("the Docker engine uses a name that does not fit into a request") from error
        body = b"" if not content else self._encoded(content)
        self.writer.write(head if content is None else head + body + self._end())

    async def send(self, piece: bytes) -> None:
        """Send a piece of the body."""
        self.writer.write(self._encoded(piece))
        await self.writer.drain()

    async def finish(self) -> None:
        """Send the end of the body."""
        self.writer.write(self._end())
        await self.writer.drain()

    async def status(self, *, body_follows: bool = False) -> int:
        """Return the status of the answer. With `body_follows`, 100 means that the Docker engine waits for the body."""
        for _ in range(_MAX_INTERIM):
            event = await self._next()
            if isinstance(event, h11.Response):
                framing = {b"content-length", b"transfer-encoding"}
                self._has_end = any(name in framing for name, _ in event.headers)
                return event.status_code
            if not isinstance(event, h11.InformationalResponse):
                break
            if event.status_code == _SWITCHING or (event.status_code == _CONTINUE and body_follows):
                return event.status_code
        raise BrokenOffError("there is no answer")

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body of the answer as it arrives."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise BrokenOffError("the answer has no end")

    async def body(self) -> bytes:
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > MAX_BODY:
                raise BrokenOffError("the answer is too long")
        return bytes(body)

    def upgraded(self, status: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection, which is a plain byte stream from here on. Raises BrokenOffError if it is not."""
        # Docker switches protocols; engines that do not send the bare stream as an answer without a length.
        if status != _SWITCHING and (status != 200 or self._has_end):
            raise BrokenOffError("the connection was not upgraded")
        if self._http.trailing_data[0]:
            raise BrokenOffError("the head of the answer is malformed")
        return self.reader, self.writer

    async def close(self) -> None:
        await close(self.writer)

    def _encoded(self, piece: bytes) -> bytes:
        return self._http.send(h11.Data(data=piece))

    def _end(self) -> bytes:
        return self._http.send(h11.EndOfMessage())

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            is_head = self._http.their_state is h11.SEND_RESPONSE
            data = await (self.reader.readuntil(b"\r\n\r\n") if is_head else self.reader.read(_READ))
            self._http.receive_data(data)
        return event


async def close(writer: asyncio.StreamWriter) -> None:
    """Close at once, without waiting for the other side."""
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
