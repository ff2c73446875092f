"""Images of the server: what sandboxes start from. A name may contain slashes, so it is a parameter of the query."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.background import BackgroundTask

from atoll import workers
from atoll.server.connections.streaming import while_connected, while_there
from atoll.server.middleware.auth import AppServices, ManageScope, ReadScope, UseScope
from atoll.server.routes.openapi_parts import BINARY, BINARY_BODY, CREATED, PREFIX, Limit, PageId
from atoll.server.routes.paging import Place, page
from atoll.server.tree_transfers import Transfer
from atoll.service.models.image_info import (
    ImageInfo,
    ImagePage,
    ImagePruneRequest,
    ImagePullRequest,
    ImagePushRequest,
    PrunedImages,
    PushedImage,
)

router = APIRouter(prefix="/images", tags=["images"])
ReferenceQuery = Annotated[
    str, Query(alias="reference", min_length=1, max_length=1024, description="The name of the image.")
]
Owner = Annotated[
    str | None, Query(max_length=256, description="The user whose image is meant. Only for administrators.")
]


@router.get("", operation_id="list_images", summary="List images")
async def list_them(caller: ReadScope, services: AppServices, page_id: PageId = None, limit: Limit = 100) -> ImagePage:
    """Return the caller's images and those for everybody, by name, one page at a time. Administrators see those of all
    users."""
    found, more = page(await services.images.list(caller), _place, page_id, limit)
    return ImagePage(items=found, next_page_id=more)


@router.get("/inspect", operation_id="get_image", summary="Get an image")
async def get(caller: ReadScope, services: AppServices, reference: ReferenceQuery, owner: Owner = None) -> ImageInfo:
    """Return what is known about an image: its digest, its size, and what it says about sandboxes made from it."""
    return await services.images.get(caller, reference, owner)


@router.delete("", operation_id="remove_image", summary="Remove an image", status_code=204)
async def remove(caller: ManageScope, services: AppServices, reference: ReferenceQuery, owner: Owner = None) -> None:
    """Remove an image that no sandbox uses. Images for everybody are removed by administrators."""
    await services.images.remove(caller, reference, owner)


@router.post("/pull", operation_id="pull_image", summary="Pull an image", status_code=201)
async def pull(caller: ManageScope, services: AppServices, request: Request, wanted: ImagePullRequest) -> ImageInfo:
    """Fetch an image from its registry as it is there now. The image belongs to the caller, unless it is `shared`.
    Answers when it is here."""
    return await while_connected(request, services.images.pull(caller, wanted))


@router.post("/push", operation_id="push_image", summary="Push an image")
async def push(caller: UseScope, services: AppServices, request: Request, wanted: ImagePushRequest) -> PushedImage:
    """Send an image to a registry. Answers when it is there."""
    return await while_connected(request, services.images.push(caller, wanted))


@router.post("/prune", operation_id="prune_images", summary="Remove unused images")
async def prune(caller: ManageScope, services: AppServices, wanted: ImagePruneRequest) -> PrunedImages:
    """Remove the caller's images that no sandbox and no saved state uses. For administrators, those of all users."""
    return await services.images.prune(caller, wanted)


@router.get(
    "/content",
    operation_id="save_image",
    summary="Save an image",
    response_class=FileResponse,
    responses={200: {"description": "The image as a file.", "content": BINARY}},
)
async def save(
    caller: UseScope, services: AppServices, request: Request, reference: ReferenceQuery, owner: Owner = None
) -> FileResponse:
    """Return an image as one file, an archive that Docker and other programs read."""
    async with contextlib.AsyncExitStack() as held:
        transfer = await held.enter_async_context(services.transfers.open())
        writing = services.images.write(caller, reference, transfer.archive, transfer.take, owner)
        await while_connected(request, writing)
        sent = held.pop_all()
    return FileResponse(transfer.archive, media_type="application/octet-stream", background=BackgroundTask(sent.aclose))


@router.put(
    "/content",
    operation_id="load_image",
    summary="Load an image",
    openapi_extra=BINARY_BODY,
    status_code=201,
    responses=CREATED,
)
async def load(
    caller: ManageScope,
    services: AppServices,
    request: Request,
    response: Response,
    name: Annotated[
        str, Query(max_length=512, description="The name of the image. Default: the one in the archive.")
    ] = "",
    shared: Annotated[bool, Query(description="Whether it is for everybody. Only administrators may say so.")] = False,
) -> ImageInfo:
    """Make an image from an archive, compressed or not: the files of a root file system, which need a `name`, or an
    image that `docker save` or another program wrote."""
    async with services.transfers.open() as transfer:
        await _received(transfer, request)
        loading = services.images.take_in(caller, transfer.archive, name, shared=shared)
        made = await while_there(request, loading)
    response.headers["Location"] = f"{PREFIX}/images/inspect?{urlencode({'reference': made.reference})}"
    return made


def _place(image: ImageInfo) -> Place:
    return 0.0, f"{image.reference}\0{image.owner_id or ''}"


async def _received(transfer: Transfer, request: Request) -> Path:
    with transfer.archive.open("xb", buffering=0) as file:
        async for piece in _body(request):
            transfer.take(len(piece))
            await workers.run(workers.TRANSFER, file.write, piece)
    return transfer.archive


async def _body(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece
