"""Limits that hold before a route sees anything: the size of a body, and how slowly it may come."""

from __future__ import annotations

import asyncio
import re

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.server.problems import respond

_UPLOADS = re.compile(r"/api/v1/(sandboxes/[^/]+/(files/(content|append|tree)|ports/.*)|snapshots/[^/]+/content$)")


class BodyLimits:
    """A pure ASGI middleware: nothing is copied or buffered on the way."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_upload_bytes: int, slow_s: float) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_upload_bytes = max_upload_bytes
        self._slow_s = slow_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._max_upload_bytes if _UPLOADS.match(scope["path"]) else self._max_body_bytes
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > most:
            await respond(_too_large(most))(scope, receive, send)
            return
        seen, over = 0, False

        async def limited() -> Message:
            nonlocal seen, over
            if over:
                return await receive()  # waiting for the client to go away may take as long as it likes
            try:
                async with asyncio.timeout(self._slow_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"nothing came for {self._slow_s:g} s", {"Connection": "close"}) from None
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                over = not message.get("more_body", False)
                if seen > most:
                    raise _too_large(most)
            return message

        await self._app(scope, limited, send)


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"at most {most} bytes are taken", {"Connection": "close"})
