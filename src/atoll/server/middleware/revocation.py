"""End long requests when the right to them ends: the key is revoked or expires, or the user is locked out.

The caller is identified when a request begins. A terminal, a stream or a slow command may go on for hours, so meanwhile
the credential is checked again every few seconds. If it is invalid, the connection is cut as if the client had
vanished.
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
    """Remember the caller of a request."""
    connection.scope[_CALLER] = caller


def caller_of(scope: Scope) -> Caller | None:
    """Return the caller of a request, or None if nobody was identified."""
    found = scope.get(_CALLER)
    return found if isinstance(found, Caller) else None


class RevocationWatch:
    """A pure ASGI middleware around all requests that have a caller."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        watching: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        # Most requests end long before that, and a timer costs them next to nothing.
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
            pass  # the database is unavailable: what was allowed goes on
        await asyncio.sleep(_LOOK_EVERY_S)
