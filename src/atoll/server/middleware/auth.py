"""Identify callers: every route names the scope that it needs, and gets a caller who has it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, Request, WebSocket
from starlette.requests import HTTPConnection

from atoll.errors import SandboxError
from atoll.server.admission import admission_of
from atoll.server.logs import request_context
from atoll.server.middleware.revocation import remember
from atoll.server.problems import respond
from atoll.server.services import Services
from atoll.service import Caller, ForbiddenError, NotAuthenticatedError, Scope

SESSION_HEADER = "X-Session-API-Key"
KEY_HEADER, RUNTIME = "X-API-Key", "/runtime/"
"""The header in which programs that were written for OpenHands's cloud send an API key, and the paths on which it is
read."""
BEARER = "atoll.bearer."
"""Prefix of a WebSocket subprotocol that carries a credential, because a page in a browser cannot set headers."""

SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key (`atoll_…`) or a token (JWT)."},
    "key": {"type": "apiKey", "in": "header", "name": KEY_HEADER, "description": "An API key."},
    "session": {"type": "apiKey", "in": "header", "name": SESSION_HEADER, "description": "Of one sandbox."},
}
"""The security schemes in openapi.json. FastAPI's own way to declare them costs every request two more calls."""


def services_of(connection: HTTPConnection) -> Services:
    services = connection.app.state.services
    assert isinstance(services, Services)
    return services


async def identify(connection: HTTPConnection) -> Caller:
    """Return the caller, and attribute the request to them from here on. Raises NotAuthenticatedError or
    RateLimitedError."""
    if (known := admission_of(connection.scope)) is not None:
        return known.caller
    services = services_of(connection)
    kind, _, credential = connection.headers.get("authorization", "").partition(" ")
    session = connection.headers.get(SESSION_HEADER)
    if kind.lower() == "bearer" and credential:
        caller = await services.identities.caller(credential.strip())
    elif (key := _runtime_key(connection)) is not None:
        caller = await services.identities.caller(key.strip())
    elif session is not None:
        caller = await services.sandboxes.credentials.by_session_key(session)
    elif (offered := _offered(connection)) is not None:
        if offered.startswith("atolls_"):
            caller = await services.sandboxes.credentials.by_session_key(offered)
        else:
            caller = await services.identities.caller(offered)
    else:
        raise NotAuthenticatedError(
            "this request needs a credential", hint="Send 'Authorization: Bearer' with an API key or a token."
        )
    take_in(connection, caller)
    remember(connection, caller)
    return caller


def take_in(connection: HTTPConnection, caller: Caller) -> None:
    """Attribute the request to this caller from here on, however they were identified. Raises RateLimitedError."""
    services = services_of(connection)
    services.rate.count(caller)
    services.admissions.admit(connection.scope, caller)
    request_context.know_user(caller.user_id)
    if caller.sandbox_id is not None:
        request_context.know_sandbox(caller.sandbox_id)


def subprotocol(websocket: WebSocket) -> str | None:
    """Return the subprotocol to answer with, if the credential was sent as one."""
    return next((name for name in websocket.scope.get("subprotocols", []) if name.startswith(BEARER)), None)


def needs(scope: Scope, *, session: bool = False) -> Callable[..., Awaitable[Caller]]:
    """Return the dependency of a route that needs this scope. With `session`, a session key is valid too, for its own
    sandbox."""

    async def check(request: Request) -> Caller:
        return allow(await identify(request), scope, session=session)

    check.scope = scope  # type: ignore[attr-defined]
    check.session = session  # type: ignore[attr-defined]
    return check


async def admit(websocket: WebSocket, scope: Scope) -> Caller | None:
    """As `needs`, for a WebSocket into a sandbox. Returns None if it was refused, after sending the error."""
    try:
        need_known_origin(websocket)
        return allow(await identify(websocket), scope, session=True)
    except SandboxError as error:
        await websocket.send_denial_response(respond(error))
        return None


def need_known_origin(connection: HTTPConnection) -> None:
    """Raise ForbiddenError for a WebSocket that a page of an unknown origin opens.

    A browser lets every page open a WebSocket anywhere, and only says which origin the page has. Known origins are this
    server's own and those in the settings. Programs send no origin.
    """
    origin = connection.headers.get("origin")
    if origin is None or connection.scope["type"] != "websocket":
        return
    known = services_of(connection).settings.cors_origins
    if (
        origin in known
        or "*" in known
        or origin.lower().partition("://")[2] == connection.headers.get("host", "").lower()
    ):
        return
    raise ForbiddenError(
        f"a page of {origin[:200]!r} may not open a WebSocket here", hint="Name its origin in cors_origins."
    )


def allow(caller: Caller, scope: Scope, *, session: bool) -> Caller:
    if caller.sandbox_id is not None and not session:
        raise ForbiddenError("the session key of a sandbox does not allow this")
    caller.need(scope)
    return caller


def _runtime_key(connection: HTTPConnection) -> str | None:
    """Return the API key in `X-API-Key`, on the paths of runtimes only. Elsewhere the header is not meant for this
    server: on the host of a port it is for the program inside."""
    is_ours = connection.scope["path"].startswith(RUNTIME) and "atoll.port" not in connection.scope
    return connection.headers.get(KEY_HEADER) if is_ours else None


def _offered(connection: HTTPConnection) -> str | None:
    for name in connection.scope.get("subprotocols", []):
        if name.startswith(BEARER):
            return str(name).removeprefix(BEARER)
    return None


ReadScope = Annotated[Caller, Depends(needs(Scope.READ))]
SandboxReadScope = Annotated[Caller, Depends(needs(Scope.READ, session=True))]
SandboxUseScope = Annotated[Caller, Depends(needs(Scope.USE, session=True))]
ManageScope = Annotated[Caller, Depends(needs(Scope.MANAGE))]
KeysScope = Annotated[Caller, Depends(needs(Scope.KEYS))]
AdminScope = Annotated[Caller, Depends(needs(Scope.ADMIN))]


async def _services(connection: HTTPConnection) -> Services:
    """Return the services. The function is async although it awaits nothing, because FastAPI calls others in a thread,
    which costs more than everything else."""
    return services_of(connection)


AppServices = Annotated[Services, Depends(_services)]
