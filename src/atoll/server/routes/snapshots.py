"""Snapshots: named states of sandboxes that outlive them and can move between servers as files."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field
from starlette.background import BackgroundTask

from atoll import workers
from atoll.errors import SandboxResourceError
from atoll.server.middleware.auth import AppServices, ManageScope, ReadScope, needs
from atoll.server.routes.openapi_parts import BINARY, BINARY_BODY, CREATED, Limit, PageId, SandboxId, locate
from atoll.server.routes.paging import Place, page
from atoll.server.services import Services
from atoll.service import Caller, Scope, SnapshotInfo
from atoll.service.models.request_model import RequestModel

router = APIRouter(prefix="/snapshots", tags=["snapshots"])
of_sandbox = APIRouter(prefix="/sandboxes/{sandbox_id}/snapshots", tags=["snapshots"])
_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
SnapshotName = Annotated[str, PathParameter(pattern=_PATTERN, description="The name of the snapshot.")]
Owner = Annotated[
    str | None, Query(max_length=256, description="The user whose snapshots are meant. Only for administrators.")
]
User = Annotated[Caller, Depends(needs(Scope.USE))]


class SnapshotPage(BaseModel):
    """One page of snapshots."""

    items: list[SnapshotInfo]
    """The snapshots of this page, oldest first."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""


class SnapshotRequest(RequestModel):
    """The snapshot to save."""

    of = "a snapshot"
    name: Annotated[str, Field(pattern=_PATTERN)]
    """A name for the snapshot, unique among the caller's snapshots."""
    checkpoint: Annotated[str, Field(max_length=64)] | None = None
    """The id or name of the checkpoint to save. Default: the present state."""
    memory: bool = False
    """Whether to save running processes too, with everything in their memory, secrets included."""
    drop_connections: bool = False
    """Connections to the outside cannot be saved, so with `memory` an open one makes the request fail unless this is
    true."""


@of_sandbox.post("", operation_id="make_snapshot", summary="Save a snapshot", status_code=201, responses=CREATED)
async def make(
    caller: ManageScope, services: AppServices, sandbox_id: SandboxId, wanted: SnapshotRequest, response: Response
) -> SnapshotInfo:
    """Save the state of a sandbox under a name. The snapshot outlives the sandbox. Answers 409 if the caller already
    has a snapshot of that name."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    made = await services.sandboxes.snapshots.create(
        caller,
        sandbox,
        wanted.name,
        wanted.checkpoint,
        memory=wanted.memory,
        drop_connections=wanted.drop_connections,
    )
    locate(response, f"/snapshots/{made.name}")
    return made


@router.get("", operation_id="list_snapshots", summary="List snapshots")
async def list_them(
    caller: ReadScope, services: AppServices, owner: Owner = None, page_id: PageId = None, limit: Limit = 100
) -> SnapshotPage:
    """Return the caller's snapshots, oldest first, one page at a time. Administrators see the snapshots of all
    users."""
    listed = await services.sandboxes.snapshots.list(caller, owner)
    found, more = page(listed, _place, page_id, limit)
    return SnapshotPage(items=found, next_page_id=more)


@router.get("/{name}", operation_id="get_snapshot", summary="Get a snapshot")
async def get(caller: ReadScope, services: AppServices, name: SnapshotName, owner: Owner = None) -> SnapshotInfo:
    """Return what is known about a snapshot: its image, size and origin."""
    return await services.sandboxes.snapshots.get(caller, name, owner)


@router.delete("/{name}", operation_id="delete_snapshot", summary="Delete a snapshot", status_code=204)
async def delete(caller: ManageScope, services: AppServices, name: SnapshotName, owner: Owner = None) -> None:
    """Delete a snapshot. Sandboxes that were made from it are not affected."""
    await services.sandboxes.snapshots.delete(caller, name, owner)


@router.get(
    "/{name}/content",
    operation_id="export_snapshot",
    summary="Export a snapshot",
    response_class=FileResponse,
    responses={200: {"description": "The snapshot as a file.", "content": BINARY}},
)
async def export(caller: User, services: AppServices, name: SnapshotName, owner: Owner = None) -> FileResponse:
    """Return a snapshot as one file with a checksum. Any server that has the same image can import it."""
    file = _new_file(services)
    try:
        await services.sandboxes.snapshots.export(caller, name, file, owner)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    gone = BackgroundTask(file.unlink, missing_ok=True)
    return FileResponse(file, media_type="application/octet-stream", background=gone)


@router.put(
    "/{name}/content",
    operation_id="import_snapshot",
    summary="Import a snapshot",
    openapi_extra=BINARY_BODY,
    status_code=201,
    responses=CREATED,
)
async def take_in(
    caller: ManageScope, services: AppServices, name: SnapshotName, request: Request, response: Response
) -> SnapshotInfo:
    """Create a snapshot from an exported file, without its saved memory. The file is checked first, and a damaged one
    is refused."""
    async with _received(services, request) as file:
        made = await services.sandboxes.snapshots.take_in(caller, name, file)
    locate(response, f"/snapshots/{made.name}")
    return made


def _place(snapshot: SnapshotInfo) -> Place:
    return snapshot.created_at.timestamp(), f"{snapshot.owner_id}/{snapshot.name}"


@asynccontextmanager
async def _received(services: Services, request: Request) -> AsyncIterator[Path]:
    file, reservation = _new_file(services), services.transfers.budgets.open(workers.account.get())
    try:
        with await workers.run(workers.TRANSFER, _open_new, file) as target:
            async for piece in request.stream():
                if reservation.take(len(piece)) < len(piece):
                    raise SandboxResourceError(
                        "your transfers take too much space on the server at once",
                        hint="Wait for other transfers to finish.",
                    )
                await workers.run(workers.TRANSFER, target.write, piece)
        yield file
    finally:
        reservation.close()
        file.unlink(missing_ok=True)


def _open_new(file: Path) -> IO[bytes]:
    return open(file, "xb", opener=lambda path, flags: os.open(path, flags, 0o600))


def _new_file(services: Services) -> Path:
    """Return a path for a new file, in a directory that the server empties when it starts."""
    return services.settings.transfers / f"snapshot-{secrets.token_hex(12)}"
