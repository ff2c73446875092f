"""Exposed ports: HTTP to what listens inside a sandbox, by path. Only ports that its spec names, with a credential or a
signed link.

What comes back is from the untrusted side. The browser is told to give it an origin of its own (`sandbox`), so a page
cannot touch this server's; cookies, redirections to elsewhere on this server and headers about the connection are left
out. The caller's credential never goes inside.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Annotated

import h11
from fastapi import APIRouter, Path, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from atoll.errors import SandboxError
from atoll.guest.ports import PortStream
from atoll.server.auth import SandboxUser, Services_
from atoll.server.routes.sandboxes import SandboxId
from atoll.server.services import Services
from atoll.service import Caller

router = APIRouter(prefix="/sandboxes/{sandbox_id}/ports", tags=["ports"])
links = APIRouter(prefix="/sandboxes/{sandbox_id}/port-links", tags=["ports"])
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_NOT_IN = _HOP | {"host", "authorization", "cookie", "x-session-api-key", "content-length", "expect", "forwarded"}
_NOT_OUT = _HOP | {
    "set-cookie",
    "content-security-policy",
    "strict-transport-security",
    "clear-site-data",
    "alt-svc",
    "service-worker-allowed",
    "access-control-allow-origin",
    "access-control-allow-credentials",
}
_POLICY = "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads"
_ANSWER_S = 60.0
Port = Annotated[int, Path(ge=1, le=65_535)]
_PIECE = 65_536


class LinkRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    port: Annotated[int, Field(ge=1, le=65_535)]
    lifetime_s: Annotated[int, Field(ge=1, le=30 * 86400)] = 3600


class PortLink(BaseModel):
    url: str
    """Good for whoever has it, for this port alone, until then or until the sandbox ends."""
    expires_at: datetime


@links.post("", operation_id="link_sandbox_port")
async def link(caller: SandboxUser, services: Services_, sandbox_id: SandboxId, wanted: LinkRequest) -> PortLink:
    """A link to an exposed port that needs no other credential: to be opened in a browser, or given to somebody."""
    until = int(time.time()) + wanted.lifetime_s
    url = await services.sandboxes.port_link(caller, sandbox_id, wanted.port, until)
    return PortLink(url=url, expires_at=datetime.fromtimestamp(until, UTC))


@router.api_route("/{port}/~{mark}/{path:path}", methods=_METHODS, include_in_schema=False)
async def forward_linked(
    request: Request, services: Services_, sandbox_id: SandboxId, port: Port, mark: str, path: str
) -> Response:
    """The same as below, for whoever has the link."""
    del path
    caller = await services.sandboxes.by_port_link(sandbox_id, port, mark)
    services.rate.count(caller)
    return await _forward(request, caller, services, sandbox_id, port, f"/ports/{port}/~{mark}/")


@router.api_route("/{port}/{path:path}", methods=_METHODS, include_in_schema=False)
async def forward(
    request: Request, caller: SandboxUser, services: Services_, sandbox_id: SandboxId, port: Port, path: str
) -> Response:
    """Pass the request on to what listens on that port, and its answer back."""
    del path  # as it was sent, with its escapes, it is in the request
    return await _forward(request, caller, services, sandbox_id, port, f"/ports/{port}/")


async def _forward(
    request: Request, caller: Caller, services: Services, sandbox_id: str, port: int, before: str
) -> Response:
    await services.sandboxes.need_exposed(caller, sandbox_id, port)
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    async with AsyncExitStack() as opened:
        try:
            await opened.enter_async_context(sandbox.use())
            stream = await opened.enter_async_context(await sandbox.connect_port(port))
        except OSError as error:
            return _plain(502, f"nothing listens on port {port} of sandbox {sandbox_id}: {error.strerror or error}")
        exchange = Exchange(stream)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await exchange.ask(request, port, before)
                answer = await exchange.answer()
        except TimeoutError:
            return _plain(504, f"what listens on port {port} did not answer in time")
        except (h11.RemoteProtocolError, OSError, SandboxError) as error:
            return _plain(502, f"what listens on port {port} does not speak HTTP: {error}")
        return StreamingResponse(_body(exchange, opened.pop_all()), answer.status_code, _headers(answer))


class Exchange:
    """One request and its answer over one stream."""

    def __init__(self, stream: PortStream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT)

    async def ask(self, request: Request, port: int, before: str) -> None:
        raw: bytes = request.scope["raw_path"]
        target = b"/" + raw.partition(before.encode())[2].partition(b"?")[0]
        if query := request.scope["query_string"]:
            target += b"?" + query
        headers = [(name, value) for name, value in request.headers.raw if name.decode("latin-1") not in _NOT_IN]
        length = request.headers.get("content-length")
        has_body = length is not None or "transfer-encoding" in request.headers
        framing = [(b"content-length", length.encode())] if length else [(b"transfer-encoding", b"chunked")]
        headers = [(b"host", f"localhost:{port}".encode()), (b"connection", b"close"), *headers]
        await self._send(
            h11.Request(method=request.method, target=target, headers=headers + (framing if has_body else []))
        )
        async for piece in request.stream():
            if piece:
                await self._send(h11.Data(data=piece))
        await self._send(h11.EndOfMessage())

    async def answer(self) -> h11.Response:
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse) or event.status_code == 101:
                raise h11.RemoteProtocolError("it did not answer")

    async def body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            await self._stream.write(data)

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._stream.read(_PIECE))
        return event


async def _body(exchange: Exchange, opened: AsyncExitStack) -> AsyncIterator[bytes]:
    async with opened:
        async for piece in exchange.body():
            yield piece


def _headers(answer: h11.Response) -> dict[str, str]:
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers}
    kept = {name: value for name, value in found.items() if name not in _NOT_OUT and not name.startswith("x-accel-")}
    return {
        **kept,
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


def _plain(status: int, text: str) -> Response:
    return PlainTextResponse(text + "\n", status, {"Content-Security-Policy": "sandbox"})
