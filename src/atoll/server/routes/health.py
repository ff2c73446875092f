"""The health of the server, its description and its metrics."""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from atoll.server.middleware.auth import AdminScope, AppServices, ReadScope

_MAX_ACCEPT = 1000
router = APIRouter(tags=["server"])


class Health(BaseModel):
    """The server works."""

    status: Literal["ok"] = "ok"
    """Always `ok`."""
    version: str
    """The version of Atoll."""


class ServerInfo(BaseModel):
    """The server, its engine and the caller."""

    version: str
    """The version of Atoll."""
    engine: str
    """The engine that makes the sandboxes."""
    engine_version: str | None
    """The version of the program or service behind the engine. Null if it is part of Atoll."""
    isolation: str | None
    """The isolation level of a sandbox that requests none. Null for plain processes."""
    capabilities: list[str]
    """The features and limits that the engine supports."""
    changeable_limits: list[str]
    """The limits that can be changed while a sandbox runs, by their names in `limits`."""
    user_id: str
    """The user who made the request."""
    scopes: list[str]
    """What the caller's credential may do."""


@router.get("/health", operation_id="health", summary="Check the server")
async def health(services: AppServices) -> Health:
    """Return the version of the server if its database and manager work, and 503 otherwise. Needs no credential."""
    await services.store.ping()
    await services.manager.start()
    return Health(version=version("atoll"))


@router.get("/info", operation_id="info", summary="Get information about the server")
async def info(caller: ReadScope, services: AppServices) -> ServerInfo:
    """Return the version of the server, what its engine can do, and the user and scopes of the caller."""
    description = await services.engine.describe()
    return ServerInfo(
        version=version("atoll"),
        engine=services.engine.name,
        engine_version=description.version,
        isolation=description.isolation,
        capabilities=sorted(description.capabilities),
        changeable_limits=sorted(description.changeable_limits),
        user_id=caller.user_id,
        scopes=sorted(caller.scopes),
    )


@router.get(
    "/metrics",
    operation_id="metrics",
    summary="Get metrics",
    response_class=PlainTextResponse,
    responses={200: {"content": {"application/openmetrics-text": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request, caller: AdminScope, services: AppServices) -> Response:
    """Return the metrics of the server in the text format of Prometheus, or in OpenMetrics for clients that accept
    it."""
    text, media_type = await services.exposition.write(request.headers.get("accept", "")[:_MAX_ACCEPT])
    return Response(text, media_type=media_type)
