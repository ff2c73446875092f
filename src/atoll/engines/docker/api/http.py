"""Requests to a Docker engine, with a deadline for each.

Every request has a connection of its own. On a unix socket that takes a tenth of a millisecond, and in return nothing
outlives a request: there is no connection pool to close, nothing belongs to an event loop, and no connection is left
over from before a restart of the Docker engine. Decision 20 has the measurements.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypedDict, Unpack
from urllib.parse import urlencode

import h11

from atoll.cancellation import ended
from atoll.engines.docker.api.endpoint import Endpoint
from atoll.engines.docker.api.exchange import MAX_BODY, MAX_HEAD, BrokenOffError, Exchange
from atoll.errors import EngineError, EngineUnavailableError
from atoll.printable import printable

QUICK_S = 5.0
"""Timeout for opening a connection, and for requests that the Docker engine answers from memory."""
SLOW_S = 60.0
_LOOK_S = 1.0
"""How often the Docker engine is pinged while a slow request runs, to find out whether it still works."""
_MAX_MESSAGE = 2000
_CONTINUE = 100
_BODILESS = ("GET", "HEAD")
_CUSTOMARY = {"Host": "docker", "User-Agent": "atoll", "Connection": "close"}
_EXPECTING = {"Expect": "100-continue"}
"""An archive is sent after "100 Continue": an engine that refuses it closes the connection, and its reason would be
lost."""


class RefusedError(Exception):
    """The Docker engine understood the request and refused it. This exception never leaves the package."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} ({status})")
        self.status = status
        self.message = message


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
            rest = bytearray()
            async for piece in answer.pieces():
                rest += piece
                if len(rest) > MAX_BODY:
                    raise BrokenOffError("a line of the answer is too long")
                if b"\n" not in piece:
                    continue
                *lines, rest = rest.split(b"\n")
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
        headers = {"Content-Type": "application/x-tar", "Transfer-Encoding": "chunked", **_EXPECTING}
        async with self._exchange(timeout_s) as exchange:
            exchange.ask("POST", _target(path, query), {**_CUSTOMARY, **headers})
            if await _accepted(exchange, body_follows=True) == _CONTINUE:
                await _answer_to(pieces, exchange)
            for line in (await exchange.body()).split(b"\n"):
                if line.strip() and isinstance(value := _decoded(line), dict):
                    yield value

    async def hijack(self, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Turn a request into a byte stream in both directions, which the caller closes."""
        async with self._translated(QUICK_S):
            exchange = await self._connect()
            try:
                _ask(exchange, "POST", path, {"body": body}, {"Connection": "Upgrade", "Upgrade": "tcp"})
                return exchange.upgraded(await _accepted(exchange))
            except BaseException:
                await exchange.close()
                raise

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, parts: RequestParts, headers: Mapping[str, str], timeout_s: float
    ) -> AsyncIterator[Exchange]:
        tar = parts.get("tar")
        async with self._exchange(timeout_s) as exchange:
            _ask(exchange, method, path, parts, headers)
            if await _accepted(exchange, body_follows=tar is not None) == _CONTINUE and tar is not None:
                await exchange.send(tar)
                await exchange.finish()
                await _accepted(exchange)
            yield exchange

    @asynccontextmanager
    async def _exchange(self, timeout_s: float) -> AsyncIterator[Exchange]:
        async with self._translated(timeout_s):
            async with asyncio.timeout(QUICK_S):
                exchange = await self._connect()
            try:
                yield exchange
            finally:
                await exchange.close()

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
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, BrokenOffError, h11.ProtocolError) as error:
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

    async def _connect(self) -> Exchange:
        where = self.endpoint
        if where.path:
            return Exchange(*await asyncio.open_unix_connection(where.path, limit=MAX_HEAD))
        return Exchange(*await asyncio.open_connection(where.host, where.port, ssl=where.tls(), limit=MAX_HEAD))


def _target(path: str, query: Mapping[str, str] | None) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _ask(exchange: Exchange, method: str, path: str, parts: RequestParts, headers: Mapping[str, str]) -> None:
    query, body, tar = parts.get("query"), parts.get("body"), parts.get("tar")
    lines = {**_CUSTOMARY, **headers}
    if tar is not None:
        lines |= {"Content-Type": "application/x-tar", "Content-Length": str(len(tar)), **_EXPECTING}
        exchange.ask(method, _target(path, query), lines)
    elif body is not None:
        content = json.dumps(body).encode()
        lines |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
        exchange.ask(method, _target(path, query), lines, content)
    else:
        exchange.ask(
            method, _target(path, query), lines if method in _BODILESS else {**lines, "Content-Length": "0"}, b""
        )


async def _accepted(exchange: Exchange, *, body_follows: bool = False) -> int:
    """Return the status of the answer. Raises RefusedError if it is a refusal."""
    status = await exchange.status(body_follows=body_follows)
    if status < 400:
        return status
    text = await exchange.body()
    with suppress(ValueError, AttributeError, TypeError, KeyError, RecursionError):
        text = str(json.loads(text)["message"]).encode()
    raise RefusedError(status, printable(text, _MAX_MESSAGE, instead=" ") or "no reason given")


async def _answer_to(pieces: AsyncIterator[bytes], exchange: Exchange) -> None:
    """Send an archive. An engine that refuses it in the middle answers, and a moment later closes the connection."""
    sending = asyncio.create_task(_send_all(pieces, exchange))
    answering = asyncio.create_task(_accepted(exchange))
    try:
        await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            await sending
        await answering
    finally:
        for task in (sending, answering):
            task.cancel()
            await ended(task)


async def _send_all(pieces: AsyncIterator[bytes], exchange: Exchange) -> None:
    async for piece in pieces:
        try:
            await exchange.send(piece)
        except OSError:  # the connection is closed, which the reader of the answer notices too
            return
    with suppress(OSError):
        await exchange.finish()


def _decoded(text: bytes | bytearray) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError("the Docker engine answered with something other than JSON") from error
