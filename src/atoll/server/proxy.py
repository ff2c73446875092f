"""HTTP to something that listens in a sandbox, through the stream that the agent gives to its port.

What comes out was written by untrusted code. It gets an origin of its own in a browser, sets no cookies, and never sees
the credentials that its caller showed to this server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import h11
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from atoll.guest.ports import PortStream

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade content-length".split()
)
_KEPT_BACK = _HOP_BY_HOP | {b"authorization", b"x-session-api-key", b"cookie", b"host", b"expect"}
_NOT_HANDED_ON = _HOP_BY_HOP | {b"set-cookie", b"content-security-policy", b"service-worker-allowed"}
_ANSWER_S = 60.0
_WALLS = "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads"


async def forward(request: Request, stream: PortStream, port: int, path: str) -> Response:
    """The answer, as it comes. The stream belongs to it from now on."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=64 << 10)
    try:
        async with asyncio.timeout(_ANSWER_S):
            sending = asyncio.create_task(_send(request, connection, stream, port, path))
            try:
                answer = await _head(connection, stream)
            finally:
                sending.cancel()
                results = await asyncio.gather(sending, return_exceptions=True)
        for result in results:
            if isinstance(result, HTTPException):
                raise result
    except TimeoutError:
        await stream.aclose()
        raise HTTPException(504, f"what listens on port {port} did not answer in time") from None
    except (h11.ProtocolError, OSError) as error:
        await stream.aclose()
        raise HTTPException(503, f"what listens on port {port} does not speak HTTP: {error}") from error
    except BaseException:
        await stream.aclose()
        raise
    response = StreamingResponse(_body(connection, stream), answer.status_code)
    response.raw_headers = [(name, value) for name, value in answer.headers if name.lower() not in _NOT_HANDED_ON]
    response.headers["Content-Security-Policy"] = _WALLS
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


async def _send(request: Request, connection: h11.Connection, stream: PortStream, port: int, path: str) -> None:
    query = f"?{request.url.query}" if request.url.query else ""
    headers = [(name, value) for name, value in request.headers.raw if name.lower() not in _KEPT_BACK]
    headers += [(b"host", f"localhost:{port}".encode()), (b"connection", b"close")]
    length = request.headers.get("content-length")
    chunked = "transfer-encoding" in request.headers
    if chunked or length:
        headers.append((b"transfer-encoding", b"chunked") if chunked else (b"content-length", (length or "0").encode()))
    target = f"/{path}{query}".encode(errors="replace")
    await stream.write(connection.send(h11.Request(method=request.method, target=target, headers=headers)) or b"")
    async for piece in request.stream():
        if piece:
            await stream.write(connection.send(h11.Data(data=piece)) or b"")
    await stream.write(connection.send(h11.EndOfMessage()) or b"")


async def _head(connection: h11.Connection, stream: PortStream) -> h11.Response:
    async for event in _events(connection, stream):
        if isinstance(event, h11.Response):
            return event
    raise h11.RemoteProtocolError("it closed the connection")


async def _body(connection: h11.Connection, stream: PortStream) -> AsyncGenerator[bytes, None]:
    try:
        async for event in _events(connection, stream):
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
    finally:
        await stream.aclose()


async def _events(connection: h11.Connection, stream: PortStream) -> AsyncIterator[object]:
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.read())
        elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
            return
        else:
            yield event
