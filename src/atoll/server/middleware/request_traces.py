"""Each request and each WebSocket is a span, and continues the trace of its client.

Its name is the method and the template of the route, as OpenTelemetry's conventions for HTTP have it. A path that a
client made up is never shown: it may contain names of files or keys.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll import tracing
from atoll.server.middleware.revocation import caller_of

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"))
_OTHER = "_OTHER"
_PORT = "port of a sandbox"
_ID = re.compile(r"[0-9a-f]{24}")
_FAILED, _SWITCHING = 500, 101


class RequestTraces:
    """A pure ASGI middleware."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """`prefix` is that of the API, which the paths of its routes do not contain."""
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        method = scope.get("method", "GET")
        method = method if method in _METHODS else _OTHER
        with (
            tracing.continuing(tracing.carried(scope["headers"])),
            tracing.span(method if method != _OTHER else "HTTP", "server", method=method) as current,
        ):
            if not current.is_recorded:
                await self._app(scope, receive, send)
                return
            status = _FAILED

            async def watched(message: Message) -> None:
                nonlocal status
                if message["type"] in ("http.response.start", "websocket.http.response.start"):
                    status = message["status"]
                elif message["type"] == "websocket.accept":
                    status = _SWITCHING
                await send(message)

            try:
                await self._app(scope, receive, watched)
            finally:
                _describe(current, scope, method, status, self._prefix)


def _describe(current: tracing.Span, scope: Scope, method: str, status: int, prefix: str) -> None:
    """Give the span what is known only at the end of the request."""
    current.set(status=status)
    route = getattr(scope.get("route"), "path", None)
    if route is not None and scope["path"].startswith(f"{prefix}/"):
        route = prefix + route
    if "atoll.port" in scope or "atoll.runtime" in scope:
        current.rename(f"{method} {_PORT}")
    elif route is not None:
        current.rename(f"{method} {route}")
        current.set(route=route)
    sandbox_id = scope.get("path_params", {}).get("sandbox_id", "")
    if _ID.fullmatch(sandbox_id):
        current.set(sandbox_id=sandbox_id)
    if (caller := caller_of(scope)) is not None:
        current.set(user_id=caller.user_id)
