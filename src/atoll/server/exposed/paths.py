"""The ports of runtimes by path, at the root of the server: `/ID`, and `/ID/vscode`, `/ID/work-1`, `/ID/work-2`.

OpenHands derives the second kind of URL from the first, and only from a path that begins with the id of the runtime.
Such a port is public, and what listens there asks for credentials of its own. A browser shows its pages without any
origin, as it does by the other path.
"""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from atoll.errors import SandboxError, SandboxNotFoundError
from atoll.server import problems
from atoll.server.auth import services_of, take_in
from atoll.server.exposed.exchange import forward
from atoll.server.exposed.hosts import say
from atoll.server.exposed.sockets import bridge
from atoll.server.exposed.way import Way
from atoll.server.limits import BodyLimits
from atoll.service import Caller
from atoll.service.runtime_models import PORTS, SERVICES

_PATH = re.compile(rb"/([0-9a-f]{24})(?:/(vscode|work-1|work-2)(?=[/?]|$))?(/.*)?", re.DOTALL)


class Paths:
    """A pure ASGI middleware: what is asked of a runtime goes to its port, everything else on to the API."""

    def __init__(self, app: ASGIApp, max_upload_bytes: int, slow_s: float) -> None:
        self._app = app
        self._ports = BodyLimits(self._serve, max_upload_bytes, max_upload_bytes, slow_s, streamed=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] in ("http", "websocket")
        found = _PATH.fullmatch(scope["raw_path"].partition(b"?")[0]) if is_request else None
        if found is None:
            await self._app(scope, receive, send)
            return
        port = SERVICES[found[2].decode()] if found[2] else PORTS["AGENT_SERVER"]
        scope["atoll.runtime"] = (found[1].decode(), port, found[3] or b"/")
        await self._ports(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "websocket":
                websocket = WebSocket(scope, receive, send)
                caller, way = await _admit(websocket)
                await bridge(websocket, caller, services_of(websocket), way)
            else:
                request = Request(scope, receive)
                caller, way = await _admit(request)
                response = await forward(request, caller, services_of(request), way)
                await response(scope, receive, send)
        except ClientDisconnect:
            return
        except (SandboxError, HTTPException, OSError, ValueError) as error:
            said = problems.of(error)
            await say(scope, receive, send, said.status, said.detail, said.hint or "")


async def _admit(connection: HTTPConnection) -> tuple[Caller, Way]:
    runtime_id, port, path = connection.scope["atoll.runtime"]
    caller = await services_of(connection).sandboxes.by_public_port(runtime_id, port)
    if caller is None:
        raise SandboxNotFoundError("There is no such runtime, or it does not run")
    take_in(connection, caller)
    query: bytes = connection.scope["query_string"]
    return caller, Way(runtime_id, port, path + (b"?" + query if query else b""), for_anyone=True)
