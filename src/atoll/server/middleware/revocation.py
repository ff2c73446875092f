"""Requests that go on for long end when the right to them does: the key is revoked or expires, the user is locked out.

Whoever asks is known when the request begins. A terminal, a stream or a slow command may go on for hours, so while one
does the credential is looked at again every few seconds, and the connection is cut as if the client had vanished.
"""

from __future__ import annotations

import asyncio

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from atoll.errors import SandboxError
from atoll.server.connections.bounded_protocol import CUT
from atoll.server.services import Services
from atoll.service import Caller, NotAuthenticatedError

_CALLER = "atoll.caller"
_LOOK_EVERY_S = 3.0


def remember(connection: HTTPConnection, caller: Caller) -> None:
    """Who a request is from."""
    connection.scope[_CALLER] = caller


class RevocationWatch:
    """A pure ASGI middleware around everything that has a caller."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        watching: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        # Most requests are over long before: a timer costs them next to nothing.
        timer = loop.call_later(_LOOK_EVERY_S, lambda: watching.append(loop.create_task(_watch(scope))))
        try:
            await self._app(scope, receive, send)
        finally:
            timer.cancel()
            for task in watching:
                task.cancel()


async def _watch(scope: Scope) -> None:
    services: Services = scope["app"].state.services
    while True:
        caller: Caller | None = scope.get(_CALLER)
        try:
            if caller is not None:
                await services.identities.check(caller)
        except NotAuthenticatedError:
            scope["state"][CUT]()
            return
        except SandboxError:
            pass  # the database is away: what was allowed goes on
        await asyncio.sleep(_LOOK_EVERY_S)
