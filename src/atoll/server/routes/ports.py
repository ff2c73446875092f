"""Exposed ports by path: with a credential, with a signed link, or without either if the port is public."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Request, WebSocket
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, Field
from starlette.requests import HTTPConnection

from atoll.errors import SandboxError
from atoll.model.addresses import plain_number
from atoll.server.connections.streaming import while_connected
from atoll.server.middleware.auth import (
    AppServices,
    ManageScope,
    SandboxReadScope,
    SandboxUseScope,
    allow,
    identify,
    need_known_origin,
    services_of,
    take_in,
)
from atoll.server.middleware.revocation import remember
from atoll.server.ports.inner_websocket import bridge
from atoll.server.ports.port_request import PortRequest, with_inside_key
from atoll.server.ports.upstream_http import forward
from atoll.server.problems import respond
from atoll.server.routes.openapi_parts import CREATED, SandboxId
from atoll.server.services import Services
from atoll.service import Caller, ExposedUrl, ForbiddenError, Scope
from atoll.service.models.exposed_port import ExposedPort
from atoll.service.models.request_model import RequestModel

router = APIRouter(prefix="/sandboxes/{sandbox_id}/ports", tags=["ports"])
links = APIRouter(prefix="/sandboxes/{sandbox_id}/port-links", tags=["ports"])
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
Port = Annotated[
    int, BeforeValidator(plain_number), Path(ge=1, le=65_535, description="The port number inside the sandbox.")
]
"""A port number in its only valid notation, because what is decided about a path must not depend on how it is
parsed."""


_LIFETIME = {"lifetime_s": "lifetime"}


class PortLinkRequest(RequestModel):
    """The port link to create."""

    of = "a port link"
    other_names = _LIFETIME
    port: Annotated[int, Field(ge=1, le=65_535)]
    """The port number inside the sandbox."""
    lifetime: Annotated[float, Field(ge=1, le=30 * 86400)] = 3600
    """Seconds until the link expires."""
    expose: bool = False
    """Whether to expose the port first, under the name `port-NUMBER`, if it is not exposed. Needs the scope
    `manage`."""


class ExposedPortRequest(RequestModel, ExposedPort):
    """The port to expose."""

    of = "an exposed port"


class PortInfo(BaseModel):
    """A TCP port that something in the sandbox listens on, or that is exposed."""

    port: int
    """The port number inside the sandbox."""
    address: str | None = None
    """The address that something listens on. Null if nothing listens."""
    pid: int | None = None
    """The id of the listening process inside. Null if it cannot be found out."""
    process: str | None = None
    """The name of the listening process. Null if it cannot be found out."""
    exposed: list[ExposedUrl] = []
    """Where the port can be reached. Empty if it is not exposed."""


class PortLink(BaseModel):
    """A signed URL for an exposed port."""

    url: str
    """The URL by path. Whoever has it can reach this one port until the link expires or the sandbox ends."""
    host_url: str | None = None
    """The URL by host name, an origin of its own where a cookie replaces the link. Null where no such host name leads
    to this server."""
    expires_at: datetime
    """When the link expires."""


@links.post("", operation_id="link_sandbox_port", summary="Create a port link", status_code=201, responses=CREATED)
async def link(
    caller: SandboxUseScope, services: AppServices, sandbox_id: SandboxId, wanted: PortLinkRequest, response: Response
) -> PortLink:
    """Create a signed URL for an exposed port. It needs no other credential, so it can be opened in a browser or
    shared."""
    if wanted.expose:
        await _expose_if_not(caller, services, sandbox_id, wanted.port)
    until = int(time.time() + wanted.lifetime)
    url, host_url, until = await services.sandboxes.ports.link(caller, sandbox_id, wanted.port, until)
    response.headers["Location"] = url
    return PortLink(url=url, host_url=host_url, expires_at=datetime.fromtimestamp(until, UTC))


@router.get("", operation_id="list_sandbox_ports", summary="List the ports of a sandbox")
async def ports(
    caller: SandboxReadScope, services: AppServices, sandbox_id: SandboxId, request: Request
) -> list[PortInfo]:
    """Return the TCP ports on which something in the sandbox listens, with the process, and the ports that are
    exposed."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    found = await while_connected(request, sandbox.ports())
    urls = await services.sandboxes.ports.urls(caller, sandbox_id)
    listed = [
        PortInfo(
            port=each.port,
            address=each.address,
            pid=each.pid,
            process=each.process,
            exposed=[url for url in urls if url.port == each.port],
        )
        for each in found
    ]
    silent = {url.port for url in urls} - {each.port for each in found}
    listed += [PortInfo(port=port, exposed=[url for url in urls if url.port == port]) for port in silent]
    return sorted(listed, key=lambda each: each.port)


@router.post("", operation_id="expose_sandbox_port", summary="Expose a port", status_code=201)
async def expose(
    caller: ManageScope, services: AppServices, sandbox_id: SandboxId, wanted: ExposedPortRequest
) -> ExposedUrl:
    """Expose a port of a running sandbox under a URL. A port of the same name is replaced. Nothing needs to listen on
    the port yet."""
    return await services.sandboxes.ports.expose(caller, sandbox_id, wanted)


@router.delete("/{port}", operation_id="hide_sandbox_port", summary="Stop exposing a port", status_code=204)
async def hide(caller: ManageScope, services: AppServices, sandbox_id: SandboxId, port: Port) -> None:
    """Stop exposing a port, under all of its names."""
    await services.sandboxes.ports.hide(caller, sandbox_id, port)


@router.api_route("/{port}/{path:path}", methods=_METHODS, include_in_schema=False)
async def by_path(request: Request, services: AppServices, sandbox_id: SandboxId, port: Port, path: str) -> Response:
    """Pass the request on to the program that listens on this port, and return its answer."""
    caller, wanted = await _admit(request, sandbox_id, port, path)
    return await forward(request, caller, services, wanted)


@router.websocket("/{port}/{path:path}")
async def socket_by_path(websocket: WebSocket, sandbox_id: SandboxId, port: Port, path: str) -> None:
    """As `by_path`, for a WebSocket."""
    try:
        caller, wanted = await _admit(websocket, sandbox_id, port, path)
    except SandboxError as error:
        await websocket.send_denial_response(respond(error))
        return
    await bridge(websocket, caller, services_of(websocket), wanted)


async def _expose_if_not(caller: Caller, services: Services, sandbox_id: str, port: int) -> None:
    if any(url.port == port for url in await services.sandboxes.ports.urls(caller, sandbox_id)):
        return
    if caller.sandbox_id is not None:
        raise ForbiddenError("the session key of a sandbox does not allow this")
    caller.need(Scope.MANAGE)
    await services.sandboxes.ports.expose(caller, sandbox_id, ExposedPort(name=f"port-{port}", port=port))


async def _admit(connection: HTTPConnection, sandbox_id: str, port: int, path: str) -> tuple[Caller, PortRequest]:
    """Return the caller and the request to pass on. Its path is taken from the raw path, with escapes as they were
    sent."""
    services = services_of(connection)
    before, until = f"/ports/{port}/", None
    caller = await services.sandboxes.credentials.by_public_port(sandbox_id, port)
    if caller is not None:
        take_in(connection, caller)
    if path.startswith("~"):
        mark = path[1:].partition("/")[0]
        if caller is None:
            caller = await services.sandboxes.credentials.by_port_link(sandbox_id, port, mark)
            take_in(connection, caller)
            remember(connection, caller)
            until = float(mark.partition(".")[0])
        before += f"~{mark}/"
    if caller is None:
        need_known_origin(connection)
        caller = allow(await identify(connection), Scope.USE, session=True)
    raw: bytes = connection.scope["raw_path"].partition(b"?")[0]
    query: bytes = connection.scope["query_string"]
    target = b"/" + raw.partition(before.encode("latin-1", "replace"))[2] + (b"?" + query if query else b"")
    return caller, await with_inside_key(connection, PortRequest(sandbox_id, port, target, until=until))
