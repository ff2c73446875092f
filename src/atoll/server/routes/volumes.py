"""Named volumes: directories that outlive the sandboxes which mount them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi import Path as PathParameter
from pydantic import BaseModel

from atoll.cancellation import finish
from atoll.errors import SandboxError
from atoll.manager import ManagedSandbox
from atoll.model import Volume
from atoll.server.connections.streaming import Download, while_connected
from atoll.server.middleware.auth import AppServices, ManageScope, ReadScope, needs
from atoll.server.routes.files import TAR, TAR_BODY, body_of, content_of
from atoll.server.routes.openapi_parts import CREATED, Limit, PageId, locate
from atoll.server.routes.paging import Place, page
from atoll.server.services import Services
from atoll.server.tree_transfers import pack, unpack
from atoll.service import Caller, SandboxRequest, Scope
from atoll.service.models.sandbox_request import SandboxSettings
from atoll.service.models.volume import (
    VOLUME_PATTERN,
    NamedVolumeInfo,
    RestoreRequest,
    VolumeCopyRequest,
    VolumeRequest,
)

router = APIRouter(prefix="/volumes", tags=["volumes"])
_INSIDE = "/volume"
"""Where the sandbox of a transfer mounts the volume."""
_TRANSFER_S = 3600.0
"""How long the sandbox of a transfer exists if the server dies."""
VolumeName = Annotated[str, PathParameter(pattern=VOLUME_PATTERN, description="The name of the volume.")]
Owner = Annotated[
    str | None, Query(max_length=256, description="The user whose volumes are meant. Only for administrators.")
]
Manager = Annotated[Caller, Depends(needs(Scope.MANAGE))]


class VolumePage(BaseModel):
    """One page of volumes."""

    items: list[NamedVolumeInfo]
    """The volumes of this page, oldest first."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""


@router.get("", operation_id="list_volumes", summary="List volumes")
async def list_them(
    caller: ReadScope, services: AppServices, owner: Owner = None, page_id: PageId = None, limit: Limit = 100
) -> VolumePage:
    """Return the caller's volumes, oldest first, one page at a time. Administrators see the volumes of all users."""
    found, more = page(await services.sandboxes.volumes.list(caller, owner), _place, page_id, limit)
    return VolumePage(items=found, next_page_id=more)


@router.post("", operation_id="create_volume", summary="Make a volume", status_code=201, responses=CREATED)
async def create(
    caller: ManageScope, services: AppServices, wanted: VolumeRequest, response: Response
) -> NamedVolumeInfo:
    """Make an empty volume. A sandbox mounts it by its name. Answers 409 if the caller already has a volume of that
    name, and 429 beyond a quota."""
    made = await services.sandboxes.volumes.create(caller, wanted.name, wanted.size)
    locate(response, f"/volumes/{made.name}")
    return made


@router.get("/{name}", operation_id="get_volume", summary="Get a volume")
async def get(caller: ReadScope, services: AppServices, name: VolumeName, owner: Owner = None) -> NamedVolumeInfo:
    """Return what is known about a volume, and the sandboxes that mount it."""
    return await services.sandboxes.volumes.get(caller, name, owner)


@router.delete("/{name}", operation_id="remove_volume", summary="Remove a volume", status_code=204)
async def remove(caller: ManageScope, services: AppServices, name: VolumeName, owner: Owner = None) -> None:
    """Remove a volume with everything in it. Answers 409, with their ids, while sandboxes mount it."""
    await services.sandboxes.volumes.remove(caller, name, owner)


@router.post("/{name}/copies", operation_id="copy_volume", summary="Copy a volume", status_code=201, responses=CREATED)
async def copy(
    caller: ManageScope, services: AppServices, name: VolumeName, wanted: VolumeCopyRequest, response: Response
) -> NamedVolumeInfo:
    """Make another volume with the present content of this one, which may be in use. With `read_only` it is a snapshot.
    Equal blocks are shared."""
    made = await services.sandboxes.volumes.copy(
        caller, name, wanted.name, read_only=wanted.read_only, size_bytes=wanted.size
    )
    locate(response, f"/volumes/{made.name}")
    return made


@router.post("/{name}/restore", operation_id="restore_volume", summary="Restore a volume")
async def restore(
    caller: ManageScope, services: AppServices, name: VolumeName, wanted: RestoreRequest
) -> NamedVolumeInfo:
    """Replace the content of a volume by that of a snapshot or another volume. Answers 409 while sandboxes mount it."""
    return await services.sandboxes.volumes.restore(caller, name, wanted.source)


@router.get(
    "/{name}/tree",
    operation_id="download_volume",
    summary="Download a volume",
    response_class=Download,
    responses={200: {"description": "An archive.", "content": TAR}},
)
async def download(caller: Manager, services: AppServices, name: VolumeName, request: Request) -> Download:
    """Return everything in a volume as a tar archive. A sandbox of the caller reads it, which exists only for that and
    counts against the caller's quotas."""
    await services.sandboxes.volumes.get(caller, name)
    async with _mounted(services, caller, name, read_only=True) as sandbox:
        archive = await while_connected(
            request, pack(services.transfers, sandbox, _INSIDE, services.settings.max_upload_bytes)
        )
    return Download(content_of(services, b"", archive), media_type="application/x-tar")


@router.put(
    "/{name}/tree",
    operation_id="upload_volume",
    summary="Upload into a volume",
    openapi_extra=TAR_BODY,
    status_code=204,
)
async def upload(caller: Manager, services: AppServices, name: VolumeName, request: Request) -> None:
    """Unpack a tar archive into a volume, which is made if it does not exist. A sandbox of the caller writes it, as for
    a download."""
    async with _mounted(services, caller, name, read_only=False) as sandbox:
        await unpack(services.transfers, sandbox, _INSIDE, body_of(request), services.settings.max_upload_bytes)


@contextlib.asynccontextmanager
async def _mounted(services: Services, caller: Caller, name: str, *, read_only: bool) -> AsyncIterator[ManagedSandbox]:
    """Yield a sandbox in which the volume is mounted, so that the server itself never opens a path of a volume."""
    settings = SandboxSettings(volumes=[Volume(name=name, path=_INSIDE, read_only=read_only)])
    made = await services.sandboxes.creation.start(caller, SandboxRequest(settings=settings, lifetime=_TRANSFER_S))
    try:
        yield await services.sandboxes.sandbox(caller, made.id)
    finally:
        with contextlib.suppress(SandboxError):
            await finish(services.manager.delete_sandbox(made.id))


def _place(volume: NamedVolumeInfo) -> Place:
    return volume.created_at.timestamp(), f"{volume.owner_id}/{volume.name}"
