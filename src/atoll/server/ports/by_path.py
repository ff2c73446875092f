"""The ports of runtimes by path, at the root of the server: `/ID`, and `/ID/vscode`, `/ID/work-1`, `/ID/work-2`.

OpenHands derives the second kind of URL from the first, and only from a path that begins with the id of the runtime.
Such a port is public, and what listens there asks for credentials of its own. Its pages have no origin in a
browser, as on the other path.
"""

from __future__ import annotations

import re

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from atoll.errors import SandboxNotFoundError
from atoll.server.middleware.auth import services_of, take_in
from atoll.server.middleware.body_limits import BodyLimits
from atoll.server.ports.port_request import PortRequest
from atoll.server.ports.serving import serve
from atoll.service import Caller
from atoll.service.models.openhands_runtime import PORTS, SERVICES

_PATH = re.compile(rb"/([0-9a-f]{24})(?:/(vscode|work-1|work-2)(?=[/?]|$))?(/.*)?", re.DOTALL)


class PortsByPath:
    """A pure ASGI middleware: requests to a runtime go to its port, all others to the API."""

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
        await serve(scope, receive, send, _admit)


async def _admit(connection: HTTPConnection) -> tuple[Caller, PortRequest]:
    runtime_id, port, path = connection.scope["atoll.runtime"]
    caller = await services_of(connection).sandboxes.credentials.by_public_port(runtime_id, port)
    if caller is None:
        raise SandboxNotFoundError("there is no such runtime, or it is not running")
    take_in(connection, caller)
    query: bytes = connection.scope["query_string"]
    return caller, PortRequest(runtime_id, port, path + (b"?" + query if query else b""), for_anyone=True)
