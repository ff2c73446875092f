"""One HTTP request to a program inside, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import h11
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from atoll.errors import SandboxError
from atoll.guest.port_streams import AsyncPortStream
from atoll.server.connections.streaming import while_there
from atoll.server.ports.pages import page
from atoll.server.ports.port_request import PortRequest
from atoll.server.services import Services
from atoll.service import Caller

_ANSWER_S = 60.0
_PIECE = 65_536


async def forward(request: Request, caller: Caller, services: Services, wanted: PortRequest) -> Response:
    """Pass the request on and return its answer. Raises the service's errors for ports that must not be reached."""
    port = wanted.port
    await services.sandboxes.ports.need_exposed(caller, wanted.sandbox_id, port)
    sandbox = await services.sandboxes.sandbox(caller, wanted.sandbox_id)
    async with AsyncExitStack() as opened:
        try:
            await opened.enter_async_context(sandbox.use())
            stream = await opened.enter_async_context(await sandbox.connect_port(port))
        except OSError as error:
            return closed(request, wanted, error)
        upstream = UpstreamHttp(stream)
        try:
            async with asyncio.timeout(_ANSWER_S) as patience:
                await upstream.ask(request, wanted, patience)
                answer = await while_there(request, upstream.answer())
        except TimeoutError:
            return page(request, 504, f"Port {port} did not answer in time")
        except (h11.ProtocolError, OSError, SandboxError) as error:
            return page(request, 502, f"The program on port {port} does not speak HTTP", str(error))
        response = StreamingResponse(_body(upstream, opened.pop_all()), answer.status_code)
        response.raw_headers = wanted.outwards(answer.headers.raw_items())
        return response


def closed(request: Request, wanted: PortRequest, error: OSError) -> Response:
    where = f"Port {wanted.port} of sandbox {wanted.sandbox_id}"
    text = f"{where}: {error.strerror or error}. The page loads as soon as something listens there."
    return page(request, 502, f"nothing listens on port {wanted.port}", text, again=True)


class UpstreamHttp:
    def __init__(self, stream: AsyncPortStream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT)

    async def ask(self, request: Request, wanted: PortRequest, patience: asyncio.Timeout) -> None:
        """Send the request inside. The deadline is extended as long as the body makes progress."""
        loop = asyncio.get_running_loop()
        length = request.headers.get("content-length")
        has_body = length is not None or "transfer-encoding" in request.headers
        framing = [(b"content-length", length.encode())] if length else [(b"transfer-encoding", b"chunked")]
        headers = [
            *wanted.inwards(request.headers.raw),
            (b"connection", b"close"),
            *(framing if has_body else []),
        ]
        await self._send(h11.Request(method=request.method, target=wanted.target, headers=headers))
        async for piece in request.stream():
            if piece:
                await self._send(h11.Data(data=piece))
                patience.reschedule(loop.time() + _ANSWER_S)
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


async def _body(upstream: UpstreamHttp, opened: AsyncExitStack) -> AsyncIterator[bytes]:
    async with opened:
        async for piece in upstream.body():
            yield piece
