"""Snapshots: states of sandboxes under names of their own, which outlive them and move between servers as files."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.background import BackgroundTask

from atoll import workers
from atoll.errors import SandboxResourceError
from atoll.server.auth import Manager, Reader, Services_, needs
from atoll.server.routes.sandboxes import SandboxId
from atoll.server.services import Services
from atoll.service import Caller, Scope, SnapshotInfo, Success

router = APIRouter(prefix="/snapshots", tags=["snapshots"])
of_sandbox = APIRouter(prefix="/sandboxes/{sandbox_id}/snapshots", tags=["snapshots"])
_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
SnapshotName = Annotated[str, PathParameter(pattern=_PATTERN)]
Owner = Annotated[str | None, Query(max_length=256, description="Of this user. Only for administrators.")]
User = Annotated[Caller, Depends(needs(Scope.USE))]
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_ANY_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": _BINARY}}


class SnapshotStart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(pattern=_PATTERN)]
    checkpoint: Annotated[str, Field(max_length=64)] | None = None
    """Its id or name; without it: as the sandbox is now."""
    memory: bool = False
    """Also what runs, with all that is in the memory of programs, secrets included."""
    drop_connections: bool = False
    """With memory: connections to the outside cannot be saved, and are in the way unless they may be dropped."""


@of_sandbox.post("", operation_id="make_snapshot")
async def make(caller: Manager, services: Services_, sandbox_id: SandboxId, wanted: SnapshotStart) -> SnapshotInfo:
    """Keep a state of a sandbox, also after it is gone. 409 if the caller has one of that name."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    return await services.sandboxes.snapshots.create(
        caller,
        sandbox,
        wanted.name,
        wanted.checkpoint,
        memory=wanted.memory,
        drop_connections=wanted.drop_connections,
    )


@router.get("", operation_id="list_snapshots")
async def list_them(caller: Reader, services: Services_, owner: Owner = None) -> list[SnapshotInfo]:
    """The caller's, oldest first. Administrators see everybody's."""
    return await services.sandboxes.snapshots.list(caller, owner)


@router.get("/{name}", operation_id="get_snapshot")
async def get(caller: Reader, services: Services_, name: SnapshotName, owner: Owner = None) -> SnapshotInfo:
    return await services.sandboxes.snapshots.get(caller, name, owner)


@router.delete("/{name}", operation_id="delete_snapshot")
async def delete(caller: Manager, services: Services_, name: SnapshotName, owner: Owner = None) -> Success:
    """Sandboxes that came from it are not affected."""
    await services.sandboxes.snapshots.delete(caller, name, owner)
    return Success()


@router.get(
    "/{name}/content",
    operation_id="export_snapshot",
    response_class=FileResponse,
    responses={200: {"description": "The snapshot as a file.", "content": _BINARY}},
)
async def export(caller: User, services: Services_, name: SnapshotName, owner: Owner = None) -> FileResponse:
    """One file, with a digest, that any server with the same image can take in."""
    file = _new_file(services)
    try:
        await services.sandboxes.snapshots.export(caller, name, file, owner)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    gone = BackgroundTask(file.unlink, missing_ok=True)
    return FileResponse(file, media_type="application/octet-stream", background=gone)


@router.put("/{name}/content", operation_id="import_snapshot", openapi_extra=_ANY_BODY)
async def take_in(caller: Manager, services: Services_, name: SnapshotName, request: Request) -> SnapshotInfo:
    """Take over a file that an export wrote, without its memory. It is checked first: a damaged one is refused, and
    nothing in it leads out."""
    async with _received(services, request) as file:
        return await services.sandboxes.snapshots.take_in(caller, name, file)


@asynccontextmanager
async def _received(services: Services, request: Request) -> AsyncIterator[Path]:
    file, holding = _new_file(services), services.transfers.budgets.open(workers.account.get())
    try:
        with await workers.run(workers.TRANSFER, _open_new, file) as target:
            async for piece in request.stream():
                if holding.take(len(piece)) < len(piece):
                    raise SandboxResourceError(
                        "your transfers take too much space on the server at once",
                        hint="Wait for other transfers to finish.",
                    )
                await workers.run(workers.TRANSFER, target.write, piece)
        yield file
    finally:
        holding.close()
        file.unlink(missing_ok=True)


def _open_new(file: Path) -> IO[bytes]:
    return open(file, "xb", opener=lambda path, flags: os.open(path, flags, 0o600))


def _new_file(services: Services) -> Path:
    """In a directory of the server's own, which is emptied when it starts."""
    return services.settings.transfers / f"snapshot-{secrets.token_hex(12)}"
