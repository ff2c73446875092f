"""Exposed ports by host name: `PORT-ID.localhost`, or below the domain that the server was given for it.

Such a host is an origin of its own with nothing but that port. The API is not available there, and nothing that a page
there can send, its cookies included, has a meaning for the API. A browser that opens a link there gets a cookie that
stands for the link, on that host alone.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from atoll.errors import SandboxError
from atoll.server.logs import request_context
from atoll.server.middleware.auth import allow, identify, services_of, take_in
from atoll.server.middleware.body_limits import BodyLimits
from atoll.server.middleware.revocation import remember
from atoll.server.ports.pages import page
from atoll.server.ports.port_request import COOKIE, PortRequest, cookies, with_inside_key
from atoll.server.ports.serving import say, serve
from atoll.server.services import Services
from atoll.service import Caller, ForbiddenError, NotAuthenticatedError
from atoll.service import Scope as Right
from atoll.service.models.openhands_runtime import PORTS, SERVICES

_OWN = b"/.atoll/"
_LINK = re.compile(rb"/\.atoll/~([0-9]{1,12}\.[0-9a-f]{0,32}\.[0-9a-f]{64})(/.*)?")
_AGENT, _NAMES = PORTS["AGENT_SERVER"], "|".join(SERVICES)
"""OpenHands puts the name of a service in front of the host of a runtime's agent server."""
_SAFE = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True, slots=True)
class _Admitted:
    caller: Caller
    until: float | None = None
    with_authorization: bool = False


class PortsByHost:
    """A pure ASGI middleware that passes requests to such a host on to the port, and all others on to the API."""

    def __init__(self, app: ASGIApp, domain: str, max_upload_bytes: int, slow_s: float) -> None:
        self._app = app
        self._below = f".{domain}"
        self._name = re.compile(
            rf"(?:({_NAMES})-(?={_AGENT}-))?([1-9][0-9]{{0,4}})-([a-z0-9]{{1,56}}){re.escape(self._below)}"
        )
        self._ports = BodyLimits(self._serve, max_upload_bytes, max_upload_bytes, slow_s, streamed=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        names = [_name(host) for host in hosts]
        if not any(name.endswith(self._below) for name in names):
            await self._app(scope, receive, send)
            return
        found = self._name.fullmatch(names[0]) if len(names) == 1 else None
        if found is None or int(found[2]) > 65_535:
            await say(scope, receive, send, 404, "There is nothing at this host")
            return
        request_context.know_sandbox(found[3])
        scope["atoll.port"] = (SERVICES[found[1]] if found[1] else int(found[2]), found[3], hosts[0])
        await self._ports(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw: bytes = scope["raw_path"].partition(b"?")[0]
        is_own = scope["type"] == "http" and raw.startswith(_OWN)
        await serve(scope, receive, send, _admit, _entered if is_own else None)


async def _entered(request: Request) -> Response:
    """Redirect a browser that opens a link to the page behind it, with a cookie, so that the URL of the link is seen
    nowhere else."""
    port, sandbox_id, _ = request.scope["atoll.port"]
    found = _LINK.fullmatch(request.scope["raw_path"].partition(b"?")[0])
    if found is None or request.method not in ("GET", "HEAD"):
        return page(request, 404, "There is nothing here")
    mark = found[1].decode()
    await services_of(request).sandboxes.credentials.by_port_link(sandbox_id, port, mark)
    query = request.scope["query_string"]
    target = b"/" + (found[2] or b"").lstrip(b"/\\") + (b"?" + query if query else b"")
    left = int(mark.partition(".")[0]) - int(time.time())
    secure = "; Secure" if _scheme(services_of(request)) == "https" else ""
    cookie = f"{COOKIE}={mark}; Path=/; HttpOnly; SameSite=Lax; Max-Age={max(left, 1)}{secure}"
    headers = {"Set-Cookie": cookie, "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
    return Response(status_code=303, headers={**headers, "Location": target.decode("latin-1")})


async def _admit(connection: HTTPConnection) -> tuple[Caller, PortRequest]:
    """Identify the caller: any for a public port, else by the cookie of a link or by a credential as for the API."""
    services = services_of(connection)
    port, sandbox_id, host = connection.scope["atoll.port"]
    admitted = await _by_port(connection, services, sandbox_id, port)
    raw: bytes = connection.scope["raw_path"].partition(b"?")[0]
    query = connection.scope["query_string"]
    wanted = PortRequest(
        sandbox_id,
        port,
        raw + (b"?" + query if query else b""),
        host,
        keeps_authorization=not admitted.with_authorization and not await _is_ours(connection, services),
        until=admitted.until,
        scheme=_scheme(services),
    )
    return admitted.caller, await with_inside_key(connection, wanted)


async def _by_port(connection: HTTPConnection, services: Services, sandbox_id: str, port: int) -> _Admitted:
    public = await services.sandboxes.credentials.by_public_port(sandbox_id, port)
    if public is not None:
        take_in(connection, public)
        return _Admitted(public)
    for mark in cookies(connection.headers.get("cookie", "")):
        try:
            caller = await services.sandboxes.credentials.by_port_link(sandbox_id, port, mark)
        except NotAuthenticatedError:
            continue
        _need_own_origin(connection)
        take_in(connection, caller)
        remember(connection, caller)
        return _Admitted(caller, until=float(mark.partition(".")[0]))
    try:
        return _Admitted(allow(await identify(connection), Right.USE, session=True), with_authorization=True)
    except NotAuthenticatedError as error:
        raise NotAuthenticatedError(
            "this port is private", hint="Open it with a port link: `POST /sandboxes/ID/port-links` creates one."
        ) from error


def _need_own_origin(connection: HTTPConnection) -> None:
    """Raise ForbiddenError unless the request only reads or comes from a page of this host.

    Browsers send the cookie along with requests of any page.
    """
    origin = connection.headers.get("origin")
    if origin is None or (connection.scope["type"] == "http" and connection.scope["method"] in _SAFE):
        return
    if origin.lower().partition("://")[2] != connection.headers.get("host", "").lower():
        raise ForbiddenError("a page of another origin may not use this port")


async def _is_ours(connection: HTTPConnection, services: Services) -> bool:
    """Whether the Authorization header is a credential of this server, and so not meant for the program inside."""
    kind, _, value = connection.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer":
        return False
    if value.strip().startswith("atoll"):
        return True
    try:
        await services.identities.caller(value.strip())
    except SandboxError:
        return False
    return True


def _scheme(services: Services) -> str:
    return "https" if services.settings.public_url.startswith("https:") else "http"


def _name(host: str) -> str:
    """Return a host name in lower case, without its port and a final dot."""
    return re.sub(r":[0-9]*$", "", host.strip().lower()).removesuffix(".")
