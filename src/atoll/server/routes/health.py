"""Whether the server works, what it is, and its figures."""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from atoll.server.auth import Admin, Reader, Services_

router = APIRouter(tags=["server"])


class Health(BaseModel):
    status: Literal["ok"] = "ok"
    version: str


class ServerInfo(BaseModel):
    version: str
    engine: str
    capabilities: list[str]
    """What its engine can enforce."""
    user_id: str
    scopes: list[str]


@router.get("/health", operation_id="health")
async def health(services: Services_) -> Health:
    """Whether the server works: its database answers, its manager runs. 503 otherwise. Needs no credential."""
    await services.store.ping()
    await services.manager.start()
    return Health(version=version("atoll"))


@router.get("/info", operation_id="info")
async def info(caller: Reader, services: Services_) -> ServerInfo:
    """What this server can do, and who you are to it."""
    return ServerInfo(
        version=version("atoll"),
        engine=services.engine.name,
        capabilities=sorted(services.engine.capabilities),
        user_id=caller.user_id,
        scopes=sorted(caller.scopes),
    )


@router.get("/metrics", operation_id="metrics", response_class=PlainTextResponse)
async def metrics(caller: Admin, services: Services_) -> PlainTextResponse:
    """For Prometheus."""
    text = services.manager.metrics() + services.sandboxes.metrics() + services.figures.exposition()
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
