"""Give every request an id, count it, and write one line about it when it ends."""

from __future__ import annotations

import re
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from atoll.server import problems
from atoll.server.logs import request_context

_SANDBOX = re.compile(r"/(?:api/v1/(?:sandboxes|webhooks)/)?([0-9a-f]{24})(?:/|$)")
"""The paths that name a sandbox by its id."""
_HEALTH = "/api/v1/health"
_SWITCHING = 101


class RequestRecord:
    """A pure ASGI middleware around everything else. It copies no body, so streams pass as they are."""

    def __init__(self, app: ASGIApp, log: FilteringBoundLogger | None = None) -> None:
        """Without a log, requests are only counted."""
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, request_context.begin(scope["headers"]))
        if (found := _SANDBOX.match(scope["path"])) is not None:
            request_context.know_sandbox(found[1])
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:
            if scope["type"] != "http" or answer.status is not None:
                raise
            # Whoever is further out would answer without the id of the request.
            await problems.respond(error)(scope, receive, answer.send)
        finally:
            self._ended(scope, answer)

    def _ended(self, scope: Scope, answer: _Answer) -> None:
        seconds = time.perf_counter() - answer.began
        route = getattr(scope.get("route"), "path", "none")
        status = answer.status or 500
        if scope["type"] == "http":
            made = getattr(scope["app"].state, "services", None)
            if made is not None:
                made.metrics.count(scope["method"], route, status, seconds)
        if self._log is None:
            return
        values: dict[str, Any] = {"status": status, "duration_s": round(seconds, 6)}
        if scope["type"] == "http" and not answer.is_complete:
            values["incomplete"] = True  # the client vanished, or was cut off
        write = self._log.debug if scope["path"] == _HEALTH else self._log.info
        write("request", method=scope.get("method", "WEBSOCKET"), route=route, **values)


class _Answer:
    """What is sent to the client, with the id of the request in a header."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (request_context.HEADER, request_id.encode())
        self.began = time.perf_counter()
        self.status: int | None = None
        self.is_complete = False

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.body":
            self.is_complete = not message.get("more_body", False)
        elif kind in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
            self.status = message.get("status", _SWITCHING)
            headers = list(message.get("headers", ()))
            if all(name.lower() != request_context.HEADER for name, _ in headers):  # a port's own answer may have one
                message = {**message, "headers": [*headers, self._header]}
        elif kind == "websocket.close":
            self.status = self.status or 403
        await self._send(message)
