"""Images on their way: pushed to a registry, saved to a file, loaded from one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.background import BackgroundTask

from atoll import workers
from atoll.server.connections.streaming import while_connected, while_there
from atoll.server.middleware.auth import AppServices, ManageScope, needs
from atoll.server.routes.openapi_parts import BINARY, BINARY_BODY, CREATED, PREFIX
from atoll.server.tree_transfers import Transfer
from atoll.service import Caller, Scope
from atoll.service.models.image_build import BuiltImageInfo
from atoll.service.models.image_transfer import ImagePushRequest, PushedImage

router = APIRouter(prefix="/images", tags=["images"])
User = Annotated[Caller, Depends(needs(Scope.USE))]
Name = Annotated[str, Query(min_length=1, max_length=1024, description="The name of the image.")]


@router.post("/push", operation_id="push_image", summary="Push an image")
async def push(caller: User, services: AppServices, request: Request, wanted: ImagePushRequest) -> PushedImage:
    """Send one of the caller's images, or one of everybody, to a registry. Answers when it is there."""
    return await while_connected(request, services.image_transfers.push(caller, wanted))


@router.get(
    "/content",
    operation_id="save_image",
    summary="Save an image",
    response_class=FileResponse,
    responses={200: {"description": "The image as a file.", "content": BINARY}},
)
async def save(caller: User, services: AppServices, request: Request, name: Name) -> FileResponse:
    """Return an image as one file, an archive that Docker and other programs read."""
    async with contextlib.AsyncExitStack() as held:
        transfer = await held.enter_async_context(services.transfers.open())
        writing = services.image_transfers.write(caller, name, transfer.archive, transfer.take)
        await while_connected(request, writing)
        until_sent = held.pop_all()
    gone = BackgroundTask(until_sent.aclose)
    return FileResponse(transfer.archive, media_type="application/octet-stream", background=gone)


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
) -> BuiltImageInfo:
    """Make an image from an archive, compressed or not: a root file system, which needs a `name`, or an image that
    `docker save` or another program wrote. It belongs to the caller."""
    async with services.transfers.open() as transfer:
        await _receive(transfer, request)
        made = await while_there(request, services.image_transfers.read(caller, transfer.archive, name))
    response.headers["Location"] = f"{PREFIX}/images/inspect?{urlencode({'name': made.reference})}"
    return BuiltImageInfo.of(made)


async def _receive(transfer: Transfer, request: Request) -> None:
    with transfer.archive.open("xb", buffering=0) as file:
        async for piece in _body(request):
            transfer.take(len(piece))
            await workers.run(workers.TRANSFER, file.write, piece)


async def _body(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        if piece:
            yield piece
