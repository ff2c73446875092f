"""The catalogue of specs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Response

from atoll.server.middleware.auth import AppServices, ManageScope, ReadScope
from atoll.server.routes.openapi_parts import CREATED, Limit, PageId, locate
from atoll.service import SandboxSpecInfo, SandboxSpecInfoPage, SandboxSpecNotFoundError
from atoll.service.models.catalogue import ImagePullRequest, SandboxSpecRequest

router = APIRouter(prefix="/sandbox-specs", tags=["specs"])
SpecPath = Annotated[str, Path(max_length=128, description="The id of the spec.")]


@router.get("/search", operation_id="search_sandbox_specs", summary="List specs")
async def search(
    caller: ReadScope, services: AppServices, page_id: PageId = None, limit: Limit = 100
) -> SandboxSpecInfoPage:
    """Return the specs that the caller can use, sorted by id: their own and those shared with everybody."""
    return await services.specs.search_sandbox_specs(caller, page_id, limit)


@router.get("", operation_id="batch_get_sandbox_specs", summary="Get several specs")
async def batch_get(
    caller: ReadScope,
    services: AppServices,
    id: Annotated[list[str], Query(min_length=1, max_length=100, description="The ids of the specs.")],
) -> list[SandboxSpecInfo | None]:
    """Return several specs in the order of the ids, with null for each one that does not exist."""
    return await services.specs.batch_get_sandbox_specs(caller, id)


@router.get("/default", operation_id="get_default_sandbox_spec", summary="Get the default spec")
async def default(caller: ReadScope, services: AppServices) -> SandboxSpecInfo:
    """Return the spec that is used for sandboxes that name none."""
    return await services.specs.get_default_sandbox_spec(caller)


@router.post("", operation_id="create_sandbox_spec", summary="Create a spec", status_code=201, responses=CREATED)
async def create(
    caller: ManageScope, services: AppServices, wanted: SandboxSpecRequest, response: Response
) -> SandboxSpecInfo:
    """Add a spec to the catalogue. Its image is fetched in the background; `image_status` shows the progress."""
    made = await services.specs.create_sandbox_spec(caller, wanted)
    locate(response, f"/sandbox-specs/{made.id}")
    return made


@router.get("/{spec_id}", operation_id="get_sandbox_spec", summary="Get a spec")
async def get(caller: ReadScope, services: AppServices, spec_id: SpecPath) -> SandboxSpecInfo:
    """Return one spec of the catalogue and the state of its image."""
    found = await services.specs.get_sandbox_spec(caller, spec_id)
    if found is None:
        raise SandboxSpecNotFoundError(f"Sandbox Spec not found: {spec_id!r}")
    return found


@router.post("/{spec_id}/pull", operation_id="pull_sandbox_spec", summary="Fetch the image of a spec", status_code=202)
async def pull(
    caller: ManageScope,
    services: AppServices,
    spec_id: SpecPath,
    wanted: Annotated[ImagePullRequest | None, Body()] = None,
) -> SandboxSpecInfo:
    """Fetch or build the image of a spec now, or again after a failure. The answer comes at once; get the spec to see
    its `image_progress`."""
    return await services.specs.pull_sandbox_spec(caller, spec_id, (wanted or ImagePullRequest()).registry_login)


@router.delete("/{spec_id}", operation_id="delete_sandbox_spec", summary="Delete a spec", status_code=204)
async def delete(caller: ManageScope, services: AppServices, spec_id: SpecPath) -> None:
    """Delete a spec from the catalogue. Sandboxes that were made from it are not affected."""
    if not await services.specs.delete_sandbox_spec(caller, spec_id):
        raise SandboxSpecNotFoundError(f"Sandbox Spec not found: {spec_id!r}")
