"""REST calls to an Atoll server. Only calls that may be repeated without harm are retried."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary

import httpx

from atoll import durable, errors, tracing, workers
from atoll.errors import (
    BuildError,
    EngineError,
    EngineUnavailableError,
    NotAuthenticatedError,
    RateLimitedError,
    SandboxError,
    SandboxGoneError,
    SandboxTimeoutError,
    SetupError,
    SpecError,
    StartError,
)

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 1.0
_GIVE_UP_S = 0.5
_PATIENT_S = 60.0
"""How long calls are retried once the server has answered: a server that is being restarted comes back, and so do the
streams that wait for it. A server that has never answered may not exist, which should be reported soon."""
_TRY_AGAIN = frozenset({502, 503, 504})
_MAX_BYTES = 64 << 20
_PIECE = 1 << 20
_MAX_LINE = 4 << 20
_STREAM_S = 60.0
"""How long a stream may be silent. A server sends a heartbeat more often."""


def _kinds(kind: type[SandboxError]) -> Iterator[type[SandboxError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _kinds(child)


_BY_CODE = {kind.code: kind for kind in _kinds(SandboxError)}
"""The errors of `atoll.errors` by code. A server can choose from this list only."""
_LONGEST = 2000
_MAX_OUTPUT = 64 << 10
_MAX_RETRY_AFTER_S = 3600.0


def error_of(status: int, body: bytes, retry_after: str | None = None) -> SandboxError:
    """Return the error that an engine on this machine would raise for what the server answers.

    An answer that is not understood becomes an EngineError that shows it. `retry_after` is the header of that name.
    """
    told = _problem(body)
    reason = str(told.get("detail", ""))[:_LONGEST]
    hint = str(told["hint"])[:_LONGEST] if isinstance(told.get("hint"), str) else None
    error = _error(status, str(told.get("code", "")), reason, hint, told)
    error.from_server = True
    if isinstance(error, RateLimitedError) and retry_after is not None and retry_after.isdecimal():
        error.retry_after_s = min(float(retry_after), _MAX_RETRY_AFTER_S)
    return error


def _error(status: int, code: str, reason: str, hint: str | None, told: Mapping[str, Any]) -> SandboxError:
    kind = _BY_CODE.get(code)
    if kind is NotAuthenticatedError or (kind is None and status == 401):
        hint = "Set ATOLL_API_KEY to a valid key: an administrator makes one by 'atoll key create'."
        return NotAuthenticatedError(f"the server refused the credential: {reason}", hint=hint)
    if kind is SandboxGoneError:
        return SandboxGoneError(reason, cause=str(told.get("cause", "unknown"))[:40], hint=hint)
    if kind is SetupError or kind is StartError:
        return kind(reason, hint=hint, output=str(told.get("output") or "")[:_MAX_OUTPUT])
    if kind is BuildError:
        return _build_error(reason, hint, told)
    if kind is not None:
        return kind(reason, hint=hint)
    if status == 422:
        return SpecError(reason, hint=hint)
    return EngineError(reason or f"the server answered {status}", hint=hint)


def _build_error(reason: str, hint: str | None, told: Mapping[str, Any]) -> BuildError:
    step, code = told.get("step"), told.get("exit_code")
    return BuildError(
        reason,
        hint=hint,
        step=step if isinstance(step, int) else 0,
        place=str(told.get("place") or "")[:_LONGEST],
        instruction=str(told.get("instruction") or "")[:_LONGEST],
        exit_code=code if isinstance(code, int) else None,
        cause=str(told.get("cause") or "")[:40],
        output=str(told.get("output") or "")[:_MAX_OUTPUT],
    )


def seconds_since_1970(time: str | float) -> float:
    """Return a time of an answer. Servers of the first version send some as numbers."""
    return datetime.fromisoformat(time).timestamp() if isinstance(time, str) else float(time)


def _problem(body: bytes) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a stream. One that is too long ends it."""
    held = b""
    async for piece in pieces:
        *whole, held = (held + piece).split(b"\n")
        if len(held) > _MAX_LINE:
            raise EngineError("the server's answer is invalid: a line is too long")
        for line in whole:
            yield line


async def _pieces(source: IO[bytes]) -> AsyncIterator[bytes]:
    while piece := await workers.run(workers.TRANSFER, source.read, _PIECE):
        yield piece


class Server:
    """An Atoll server. May be used from several event loops, one after another: each gets its own connections."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._place = httpx.URL(self.url).host
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = httpx.Timeout(timeout_s, connect=10.0)
        self._tls: ssl.SSLContext | None = None
        self._used = False
        self._answered = False
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def call(
        self,
        method: str,
        path: str,
        *,
        safe: bool = True,
        key: str | None = None,
        timeout_s: float | None = None,
        content_type: str | None = None,
        **options: Any,
    ) -> Any:
        """Return the JSON of the answer. Raises the server's error, or EngineUnavailableError.

        `safe` calls are retried: calls that only read, those with an idempotency key, and those that have the same
        effect when they are repeated.
        """
        headers = {"Idempotency-Key": key} if key is not None else {}
        headers |= {"Content-Type": content_type} if content_type is not None else {}
        deadline = time.monotonic() + ((_PATIENT_S if self._answered else _GIVE_UP_S) if safe else 0.0)
        pause_s = _FIRST_PAUSE_S
        if timeout_s is not None:
            options["timeout"] = timeout_s
        while True:
            try:
                client = await self._client()
                with tracing.span(method, "client", method=method, server_address=self._place) as current:
                    told = {**tracing.headers(), **headers}
                    answer = await client.request(method, f"{self.url}/api/v1{path}", headers=told, **options)
                    current.set(status=answer.status_code)
            except httpx.ConnectError as error:
                failure: Exception = EngineUnavailableError(
                    f"the server {self.url} cannot be reached: {error}", hint="Is it running? Check ATOLL_URL."
                )
            except httpx.TimeoutException:
                failure = SandboxTimeoutError(f"the server {self.url} did not answer in time")
            except httpx.HTTPError as error:
                failure = EngineUnavailableError(f"the connection to {self.url} broke: {error!r}")
            else:
                self._answered = True
                if answer.is_success:
                    return answer.json() if answer.content else None
                wait = answer.headers.get("Retry-After")
                failure = error_of(answer.status_code, answer.content[:_MAX_BYTES], wait)
                if answer.status_code not in _TRY_AGAIN:
                    raise failure
            if time.monotonic() + pause_s > deadline:
                raise failure
            await asyncio.sleep(pause_s * (0.5 + random.random()))  # noqa: S311
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def items(self, path: str, params: Mapping[str, str] | None = None) -> list[Any]:
        """Return all items of a list, page by page. Servers of the first version return some lists as a whole."""
        found: list[Any] = []
        query = dict(params or {})
        while True:
            answer = await self.call("GET", path, params=query)
            if isinstance(answer, list):
                return answer
            found += answer["items"]
            if answer["next_page_id"] is None:
                return found
            query["page_id"] = answer["next_page_id"]

    async def download(self, path: str, file: Path, timeout_s: float) -> None:
        """Write the server's answer to a file, atomically."""
        try:
            client = await self._client()
            address = f"{self.url}/api/v1{path}"
            async with client.stream("GET", address, headers=tracing.headers(), timeout=timeout_s) as answer:
                if not answer.is_success:
                    raise error_of(answer.status_code, await answer.aread())
                with durable.draft(file) as draft, await workers.run(workers.TRANSFER, draft.open, "xb") as target:
                    async for piece in answer.aiter_raw():
                        await workers.run(workers.TRANSFER, target.write, piece)
        except httpx.HTTPError as error:
            raise EngineUnavailableError(f"the connection to {self.url} broke: {error!r}") from error
        except OSError as error:
            raise EngineError(f"'{file}' could not be written: {error.strerror or error}") from error

    async def lines(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream. Raises the server's error, or EngineUnavailableError if the connection breaks;
        only then it may be opened again."""
        try:
            client = await self._client()
            address, told = f"{self.url}/api/v1{path}", tracing.headers()
            async with client.stream("GET", address, params=dict(params), headers=told, timeout=_STREAM_S) as answer:
                if not answer.is_success:
                    raise error_of(answer.status_code, await answer.aread())
                async for line in _lines(answer.aiter_bytes()):
                    event = _problem(line)
                    if event.get("type") == "error":
                        raise error_of(int(event.get("status") or 500), line)
                    yield event
        except httpx.HTTPError as error:
            raise EngineUnavailableError(f"the connection to {self.url} broke: {error!r}") from error

    async def upload(self, path: str, file: Path, timeout_s: float, **options: Any) -> Any:
        """Upload a file. Returns the JSON of the answer."""
        try:
            with await workers.run(workers.TRANSFER, file.open, "rb") as source:
                return await self.call("PUT", path, safe=False, timeout_s=timeout_s, content=_pieces(source), **options)
        except OSError as error:
            raise EngineError(f"'{file}' cannot be read: {error.strerror or error}") from error

    def ask(self, path: str) -> Any:
        """Return the JSON of the answer to a GET, from outside of any event loop. The call blocks."""
        try:
            answer = httpx.get(f"{self.url}/api/v1{path}", headers=self.headers, timeout=10.0)
        except httpx.HTTPError as error:
            raise EngineUnavailableError(
                f"the server {self.url} cannot be reached: {error}", hint="Is it running? Check ATOLL_URL."
            ) from error
        if not answer.is_success:
            raise error_of(answer.status_code, answer.content)
        return answer.json()

    async def aclose(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._tls is None:
            # Reading all certificates takes long enough to delay everything else in the event loop.
            self._tls = await workers.run(workers.ENGINE, self._tls_context)
        client = self._clients.get(loop)
        if client is None:
            # Connections are kept open only in the first event loop. A loop that ends without notice would leave them
            # open.
            limits = httpx.Limits(max_connections=100, max_keepalive_connections=0 if self._used else 20)
            self._used = True
            client = httpx.AsyncClient(headers=self.headers, timeout=self._timeout, limits=limits, verify=self._tls)
            self._clients[loop] = client
        return client

    def _tls_context(self) -> ssl.SSLContext:
        """Return the TLS settings. For a server without TLS they trust no authority, which is faster to create."""
        if self.url.startswith("http://"):
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return httpx.create_ssl_context()
