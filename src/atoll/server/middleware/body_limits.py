"""Limits that apply before a route is called: the size of a body, and how slowly it may arrive."""

from __future__ import annotations

import asyncio
import re

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.errors import SandboxError
from atoll.server.admission import admission_of
from atoll.server.middleware.auth import identify
from atoll.server.problems import Refusal, respond
from atoll.service import RateLimitedError

_UPLOADS = re.compile(
    r"/api/v1/(sandboxes/[^/]+/(files/(content|append|tree)|commands/[^/]+/stdin$|ports/.*)|snapshots/[^/]+/content$"
    r"|images/(builds|content)$|volumes/[^/]+/tree$)"
)
_SMALL = 64 << 10
"""How much of a body is read before its sender is identified."""


class BodyLimits:
    """A pure ASGI middleware. It copies and buffers nothing."""

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, max_upload_bytes: int, slow_s: float, *, streamed: bool = False
    ) -> None:
        """`streamed` says that no body is ever held as a whole, whatever its path."""
        self._app = app
        self._streamed = streamed
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
        streamed = self._streamed or bool(_UPLOADS.match(scope["path"]))

        async def limited() -> Message:
            nonlocal seen, over
            if over:
                return await receive()  # only the end of the connection can come, at any time
            try:
                async with asyncio.timeout(self._slow_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"no data received for {self._slow_s:g} s", {"Connection": "close"}) from None
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                over = not message.get("more_body", False)
                if seen > most:
                    raise _too_large(most)
                if not streamed and seen > _SMALL:
                    await _account(scope, len(message.get("body", b"")))
            return message

        await self._app(scope, limited, send)


async def _account(scope: Scope, size: int) -> None:
    """Charge a body to its user. The route gets it as a whole, so it is held in memory and the user has to be
    identified first."""
    try:
        caller = await identify(HTTPConnection(scope))
        admission = admission_of(scope)
        if admission is None or admission.reservation.take(size) < size:
            raise RateLimitedError(
                f"the requests of user {caller.user_id!r} need too much of the server's memory at once",
                retry_after_s=1,
                hint="Send large bodies one after another, or as files.",
            )
    except SandboxError as error:
        raise Refusal(error) from error


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"at most {most} bytes are accepted", {"Connection": "close"})
