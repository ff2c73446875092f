"""Images: what sandboxes are made from, pulled by users and kept for them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query

from atoll.server.middleware.auth import AdminScope, AppServices, ManageScope, ReadScope
from atoll.server.routes.openapi_parts import Limit, PageId
from atoll.server.routes.paging import Place, page
from atoll.service.models.images import (
    ImageDetails,
    ImageInfo,
    ImagePage,
    ImagePruneRequest,
    ImageSharingRequest,
    ImagesPruned,
    StoredImagePullRequest,
)

router = APIRouter(prefix="/images", tags=["images"])
Name = Annotated[str, Query(min_length=1, max_length=1024, description="The name of the image.")]
Owner = Annotated[
    str | None, Query(max_length=256, description="The user whose image is meant. Only for administrators.")
]


@router.get("", operation_id="list_images", summary="List images")
async def list_them(caller: ReadScope, services: AppServices, page_id: PageId = None, limit: Limit = 100) -> ImagePage:
    """Return the caller's images and those of everybody, sorted by name, one page at a time. Administrators see the
    images of all users."""
    found, more = page(await services.images.list(caller), _place, page_id, limit)
    return ImagePage(items=found, next_page_id=more)


@router.get("/inspect", operation_id="get_image", summary="Get an image")
async def get(caller: ReadScope, services: AppServices, name: Name, owner: Owner = None) -> ImageDetails:
    """Return one image with its configuration, or how far the pull of it is."""
    return await services.images.get(caller, name, owner)


@router.delete("", operation_id="delete_image", summary="Delete an image", status_code=204)
async def delete(caller: ManageScope, services: AppServices, name: Name, owner: Owner = None) -> None:
    """Delete one of the caller's images, or stop pulling it. One that sandboxes use stays: the answer is then 422. Only
    administrators may delete images of everybody."""
    await services.images.delete(caller, name, owner)


@router.post("/pull", operation_id="pull_image", summary="Pull an image", status_code=202)
async def pull(caller: ManageScope, services: AppServices, wanted: StoredImagePullRequest) -> ImageInfo:
    """Pull an image from its registry, or see whether it has changed there. The answer comes at once; get the image to
    see its `status` and `progress`."""
    return await services.images.pull(caller, wanted)


@router.post("/prune", operation_id="prune_images", summary="Remove images that nobody uses")
async def prune(
    caller: ManageScope, services: AppServices, wanted: Annotated[ImagePruneRequest | None, Body()] = None
) -> ImagesPruned:
    """Remove the caller's images that no sandbox uses; for administrators, those of all users, and what the server
    keeps for later pulls and builds."""
    return await services.images.prune(caller, wanted or ImagePruneRequest())


@router.put("/sharing", operation_id="share_image", summary="Share an image")
async def share(caller: AdminScope, services: AppServices, wanted: ImageSharingRequest) -> ImageDetails:
    """Give the image of a user to everybody, or the other way round."""
    return await services.images.share(caller, wanted)


def _place(image: ImageInfo) -> Place:
    return 0.0, f"{image.name} {image.owner_id or ''}"
