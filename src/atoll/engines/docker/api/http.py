"""The part of HTTP/1.1 that the Docker API needs, on asyncio's streams.

Every request has a connection of its own. On a unix socket that takes a tenth of a millisecond, and in return nothing
outlives a request: there is no connection pool to close, nothing belongs to an event loop, and no connection is left
over from before a restart of the Docker engine. Decision 20 has the measurements.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack
from urllib.parse import urlencode

from atoll.cancellation import ended
from atoll.engines.docker.api.endpoint import Endpoint
from atoll.errors import EngineError, EngineUnavailableError
from atoll.printable import printable

QUICK_S = 5.0
"""Timeout for opening a connection, and for requests that the Docker engine answers from memory."""
SLOW_S = 60.0
_LOOK_S = 1.0
"""How often the Docker engine is pinged while a slow request runs, to find out whether it still works."""
_MAX_HEAD = 64 << 10
_MAX_BODY = 64 << 20
_MAX_MESSAGE = 2000
_READ = 64 << 10
_CONTINUE = 100


class RefusedError(Exception):
    """The Docker engine understood the request and refused it. This exception never leaves the package."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} ({status})")
        self.status = status
        self.message = message


class BrokenOffError(Exception):
    """The Docker engine closed the connection in the middle of its answer. This exception never leaves the package."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                if size > _MAX_BODY:
                    raise BrokenOffError("an absurd chunk")
                yield (await self.reader.readexactly(size + 2))[:-2]
        elif length := self.headers.get("content-length"):
            if int(length) > _MAX_BODY:
                raise BrokenOffError("an absurd length")
            yield await self.reader.readexactly(int(length))
        elif self.status not in (101, 204, 304):
            while piece := await self.reader.read(_READ):
                yield piece

    async def body(self) -> bytes:
        parts, size = [], 0
        async for piece in self.pieces():
            size += len(piece)
            if size > _MAX_BODY:
                raise BrokenOffError("an absurd length")
            parts.append(piece)
        return b"".join(parts)


class RequestParts(TypedDict, total=False):
    """What a request may have besides its method and path."""

    query: Mapping[str, str]
    body: Any
    """Sent as JSON."""
    tar: bytes
    """Sent instead of a body, once the engine asks for it."""


class Http:
    """Requests to one Docker engine. They raise EngineUnavailableError without an answer, RefusedError for a
    refusal."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    async def call(self, method: str, path: str, *, timeout_s: float = QUICK_S, **parts: Unpack[RequestParts]) -> Any:
        """Return the JSON of the answer; None if its body is empty."""
        text = await self.raw(method, path, timeout_s=timeout_s, **parts)
        return _decoded(text) if text.strip() else None

    async def raw(self, method: str, path: str, *, timeout_s: float = SLOW_S, **parts: Unpack[RequestParts]) -> bytes:
        """Return the body of the answer as it is."""
        async with self._request(method, path, parts, {}, timeout_s) as answer:
            return await answer.body()

    async def lines(
        self, method: str, path: str, *, query: Mapping[str, str], headers: Mapping[str, str], timeout_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the JSON objects of the answer, one per line, as they arrive."""
        async with self._request(method, path, {"query": query}, headers, timeout_s) as answer:
            rest = b""
            async for piece in answer.pieces():
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _MAX_BODY:
                    raise BrokenOffError("an absurd line")
                for line in lines:
                    if line.strip() and isinstance(value := _decoded(line), dict):
                        yield value

    async def stream(self, path: str, timeout_s: float) -> AsyncIterator[bytes]:
        """Yield the answer to a GET piece by piece, whatever its length."""
        try:
            async with self._request("GET", path, {}, {}, timeout_s) as answer:
                async for piece in answer.pieces():
                    yield piece
        except RefusedError as error:
            raise EngineError(f"the Docker engine refused: {error.message}") from error

    async def send(
        self, path: str, query: Mapping[str, str], pieces: AsyncIterator[bytes], timeout_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """POST a tar archive piece by piece. Yields the JSON objects of the answer, one per line."""
        async with self._translated(timeout_s):
            reader, writer = await self._connect()
            try:
                headers = {"Connection": "close", "Content-Type": "application/x-tar", "Transfer-Encoding": "chunked"}
                headers |= {"Host": "docker", "Expect": "100-continue"}
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                writer.write(f"POST {path}?{urlencode(query)} HTTP/1.1\r\n{lines}\r\n".encode())
                answer = await _accepted(reader, writer)
                if answer.status == _CONTINUE:
                    answer = await _answer_to(pieces, reader, writer)
                for line in (await answer.body()).split(b"\n"):
                    if line.strip() and isinstance(value := _decoded(line), dict):
                        yield value
            finally:
                await close(writer)

    async def hijack(self, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Turn a request into a byte stream in both directions, which the caller closes."""
        async with self._translated(QUICK_S):
            reader, writer = await self._connect()
            try:
                headers = {"Connection": "Upgrade", "Upgrade": "tcp"}
                writer.write(_encoded("POST", path, {"body": body}, headers))
                answer = await _head(reader, writer)
                await _refuse(answer)
            except BaseException:
                await close(writer)
                raise
            return reader, writer

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, parts: RequestParts, headers: Mapping[str, str], timeout_s: float
    ) -> AsyncIterator[Answer]:
        async with self._translated(timeout_s):
            async with asyncio.timeout(QUICK_S):
                reader, writer = await self._connect()
            try:
                writer.write(_encoded(method, path, parts, {"Connection": "close", **headers}))
                answer = await _head(reader, writer, bodiless=method == "HEAD")
                if answer.status == _CONTINUE and (tar := parts.get("tar")) is not None:
                    writer.write(tar)
                    await writer.drain()
                    answer = await _head(reader, writer)
                await _refuse(answer)
                yield answer
            finally:
                await close(writer)

    @asynccontextmanager
    async def _translated(self, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                watching = asyncio.create_task(self._watch(deadline)) if timeout_s > QUICK_S else None
                try:
                    yield
                finally:
                    if watching is not None:
                        watching.cancel()
        except TimeoutError as error:
            raise EngineUnavailableError(
                f"the Docker engine at {self.endpoint} does not answer",
                hint="Look at it with 'docker info'; it may hang or be overloaded.",
            ) from error
        except PermissionError as error:
            raise EngineUnavailableError(
                f"this user may not use the Docker engine at {self.endpoint}",
                hint="Add the user to the group 'docker' and log in again, or run as root.",
            ) from error
        except OSError as error:
            raise EngineUnavailableError(
                f"there is no Docker engine at {self.endpoint}: {error.strerror or error}",
                hint="Start it ('systemctl start docker'), or set DOCKER_HOST to where it is.",
            ) from error
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, BrokenOffError, ValueError) as error:
            raise EngineUnavailableError(
                f"the Docker engine at {self.endpoint} broke off its answer",
                hint="It may be restarting; try again.",
            ) from error

    async def _watch(self, deadline: asyncio.Timeout) -> None:
        """End a slow request if the Docker engine hangs. An engine that works on a request still answers pings."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                with suppress(RefusedError):  # a proxy in between may refuse the ping, which is an answer too
                    await self.raw("GET", "/_ping", timeout_s=QUICK_S)
            except EngineUnavailableError:
                with suppress(RuntimeError):  # the request has ended meanwhile
                    deadline.reschedule(asyncio.get_running_loop().time())
                return

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        where = self.endpoint
        if where.path:
            return await asyncio.open_unix_connection(where.path, limit=_MAX_HEAD)
        return await asyncio.open_connection(where.host, where.port, ssl=where.tls(), limit=_MAX_HEAD)


async def close(writer: asyncio.StreamWriter) -> None:
    """Close at once, without waiting for the other side."""
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


def _encoded(method: str, path: str, parts: RequestParts, headers: Mapping[str, str]) -> bytes:
    query, body, tar = parts.get("query"), parts.get("body"), parts.get("tar")
    content = b"" if body is None else json.dumps(body).encode()
    lines = {"Host": "docker", "User-Agent": "atoll", **headers}
    if tar is None:
        lines |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
    else:
        # The archive is sent after "100 Continue": an engine that refuses closes the connection, and its reason would
        # be lost.
        lines |= {"Content-Type": "application/x-tar", "Content-Length": str(len(tar)), "Expect": "100-continue"}
    target = f"{path}?{urlencode(query)}" if query else path
    head = f"{method} {target} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{head}\r\n".encode() + content


async def _head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, bodiless: bool = False) -> Answer:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    if bodiless:  # the headers of this answer describe the body of a GET
        lines = []
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    version, _, rest = status.partition(" ")
    if not version.startswith("HTTP/1."):
        raise BrokenOffError("not HTTP")
    return Answer(int(rest[:3]), headers, reader, writer)


async def _accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
    answer = await _head(reader, writer)
    await _refuse(answer)
    return answer


async def _answer_to(
    pieces: AsyncIterator[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Answer:
    """Send an archive. An engine that refuses it in the middle answers, and a moment later closes the connection."""
    sending = asyncio.create_task(_send_all(pieces, writer))
    answering = asyncio.create_task(_accepted(reader, writer))
    try:
        await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            await sending
        return await answering
    finally:
        for task in (sending, answering):
            task.cancel()
            await ended(task)


async def _send_all(pieces: AsyncIterator[bytes], writer: asyncio.StreamWriter) -> None:
    async for piece in pieces:
        if piece:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            try:
                await writer.drain()
            except OSError:  # the connection is closed, which the reader of the answer notices too
                return
    writer.write(b"0\r\n\r\n")


async def _refuse(answer: Answer) -> None:
    if answer.status < 400:
        return
    text = await answer.body()
    with suppress(ValueError, AttributeError, TypeError):
        text = str(json.loads(text)["message"]).encode()
    raise RefusedError(answer.status, printable(text, _MAX_MESSAGE, instead=" ") or "no reason given")


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError("the Docker engine answered with something other than JSON") from error
