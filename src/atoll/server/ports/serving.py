"""Serving a request or a WebSocket on an exposed port: it is passed inside, and a failure becomes a page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from atoll.errors import SandboxError
from atoll.server import problems
from atoll.server.middleware.auth import services_of
from atoll.server.ports.inner_websocket import bridge
from atoll.server.ports.pages import page
from atoll.server.ports.port_request import PortRequest
from atoll.server.ports.upstream_http import forward
from atoll.service import Caller

Admit = Callable[[HTTPConnection], Awaitable[tuple[Caller, PortRequest]]]
"""Returns the caller and what to request inside, or raises."""
Answer = Callable[[Request], Awaitable[Response]]


async def serve(scope: Scope, receive: Receive, send: Send, admit: Admit, answer: Answer | None = None) -> None:
    """Pass a request or a WebSocket to its port. `answer`, if given, answers requests instead."""
    try:
        if scope["type"] == "websocket":
            websocket = WebSocket(scope, receive, send)
            caller, wanted = await admit(websocket)
            await bridge(websocket, caller, services_of(websocket), wanted)
        else:
            request = Request(scope, receive)
            response = await (answer(request) if answer is not None else _forwarded(request, admit))
            await response(scope, receive, send)
    except ClientDisconnect:
        return
    except (SandboxError, HTTPException, OSError, ValueError) as error:
        said = problems.of(error)
        await say(scope, receive, send, said.status, said.detail, said.hint or "")


async def _forwarded(request: Request, admit: Admit) -> Response:
    caller, wanted = await admit(request)
    return await forward(request, caller, services_of(request), wanted)


async def say(scope: Scope, receive: Receive, send: Send, status: int, title: str, text: str = "") -> None:
    """Answer with a page of the server."""
    if scope["type"] == "websocket":
        websocket = WebSocket(scope, receive, send)
        await websocket.send_denial_response(page(websocket, status, title, text))
        return
    response: Response = page(Request(scope, receive), status, title, text)
    await response(scope, receive, send)
