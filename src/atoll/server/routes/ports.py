"""Exposed ports by path: only those that are exposed, with a credential or a signed link, or public ones."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Request, WebSocket
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.requests import HTTPConnection

from atoll.errors import SandboxError
from atoll.network.names import plain_number
from atoll.server.auth import (
    Manager,
    SandboxReader,
    SandboxUser,
    Services_,
    allow,
    identify,
    need_known_origin,
    services_of,
    take_in,
)
from atoll.server.exposed.exchange import forward
from atoll.server.exposed.inside_key import with_inside_key
from atoll.server.exposed.sockets import bridge
from atoll.server.exposed.way import Way
from atoll.server.problems import respond
from atoll.server.routes.sandboxes import SandboxId
from atoll.server.services import Services
from atoll.server.standing import remember
from atoll.server.streaming import while_connected
from atoll.service import Caller, ExposedUrl, ForbiddenError, Scope, Success
from atoll.service.models import ExposedPort

router = APIRouter(prefix="/sandboxes/{sandbox_id}/ports", tags=["ports"])
links = APIRouter(prefix="/sandboxes/{sandbox_id}/port-links", tags=["ports"])
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
Port = Annotated[int, BeforeValidator(plain_number), Path(ge=1, le=65_535)]
"""Written in one way only: what is decided on a path must not depend on who reads it."""


class LinkRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    port: Annotated[int, Field(ge=1, le=65_535)]
    lifetime_s: Annotated[int, Field(ge=1, le=30 * 86400)] = 3600
    expose: bool = False
    """Expose the port first if it is not exposed, under the name `port-NUMBER`. That needs the scope `manage`."""


class PortInfo(BaseModel):
    """A TCP port that something in the sandbox listens on, or that is exposed."""

    port: int
    address: str | None = None
    """The address that it listens on inside; null if nothing does."""
    pid: int | None = None
    """The process, as numbered inside; null where that cannot be seen."""
    process: str | None = None
    exposed: list[ExposedUrl] = []
    """Where it can be reached; empty if it is not exposed."""


class PortLink(BaseModel):
    url: str
    """Good for whoever has it, for this port alone, until then or until the sandbox ends."""
    host_url: str | None = None
    """The same by host name: an origin of its own, where it leaves a cookie."""
    expires_at: datetime


@links.post("", operation_id="link_sandbox_port")
async def link(caller: SandboxUser, services: Services_, sandbox_id: SandboxId, wanted: LinkRequest) -> PortLink:
    """A link to an exposed port that needs no other credential: to be opened in a browser, or given to somebody."""
    if wanted.expose:
        await _expose_if_not(caller, services, sandbox_id, wanted.port)
    until = int(time.time()) + wanted.lifetime_s
    url, host_url, until = await services.sandboxes.port_link(caller, sandbox_id, wanted.port, until)
    return PortLink(url=url, host_url=host_url, expires_at=datetime.fromtimestamp(until, UTC))


@router.get("", operation_id="list_sandbox_ports")
async def ports(caller: SandboxReader, services: Services_, sandbox_id: SandboxId, request: Request) -> list[PortInfo]:
    """What listens inside, with its process, and which ports are exposed."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    found = await while_connected(request, sandbox.ports())
    urls = await services.sandboxes.exposed_urls(caller, sandbox_id)
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


@router.post("", operation_id="expose_sandbox_port", status_code=201)
async def expose(caller: Manager, services: Services_, sandbox_id: SandboxId, wanted: ExposedPort) -> ExposedUrl:
    """Expose a port while the sandbox runs. A port of the same name is replaced; whether something listens there yet
    does not matter."""
    return await services.sandboxes.expose_port(caller, sandbox_id, wanted)


@router.delete("/{port}", operation_id="hide_sandbox_port")
async def hide(caller: Manager, services: Services_, sandbox_id: SandboxId, port: Port) -> Success:
    """Expose a port no longer, under any of its names."""
    await services.sandboxes.hide_port(caller, sandbox_id, port)
    return Success()


@router.api_route("/{port}/{path:path}", methods=_METHODS, include_in_schema=False)
async def by_path(request: Request, services: Services_, sandbox_id: SandboxId, port: Port, path: str) -> Response:
    """Pass the request on to what listens on that port, and its answer back."""
    caller, way = await _admit(request, sandbox_id, port, path)
    return await forward(request, caller, services, way)


@router.websocket("/{port}/{path:path}")
async def socket_by_path(websocket: WebSocket, sandbox_id: SandboxId, port: Port, path: str) -> None:
    """The same for a WebSocket."""
    try:
        caller, way = await _admit(websocket, sandbox_id, port, path)
    except SandboxError as error:
        await websocket.send_denial_response(respond(error))
        return
    await bridge(websocket, caller, services_of(websocket), way)


async def _expose_if_not(caller: Caller, services: Services, sandbox_id: str, port: int) -> None:
    if any(url.port == port for url in await services.sandboxes.exposed_urls(caller, sandbox_id)):
        return
    if caller.sandbox_id is not None:
        raise ForbiddenError("the session key of a sandbox does not allow this")
    caller.need(Scope.MANAGE)
    await services.sandboxes.expose_port(caller, sandbox_id, ExposedPort(name=f"port-{port}", port=port))


async def _admit(connection: HTTPConnection, sandbox_id: str, port: int, path: str) -> tuple[Caller, Way]:
    """Who asks, and for what; as it was sent, with its escapes, the path is in the request."""
    services = services_of(connection)
    before, until = f"/ports/{port}/", None
    caller = await services.sandboxes.by_public_port(sandbox_id, port)
    if caller is not None:
        take_in(connection, caller)
    if path.startswith("~"):
        mark = path[1:].partition("/")[0]
        if caller is None:
            caller = await services.sandboxes.by_port_link(sandbox_id, port, mark)
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
    return caller, await with_inside_key(connection, Way(sandbox_id, port, target, until=until))
