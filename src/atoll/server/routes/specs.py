"""The catalogue of specs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query

from atoll.server.auth import Manager, Reader, Services_
from atoll.server.routes.sandboxes import Limit, PageId
from atoll.service import SandboxSpecInfo, SandboxSpecInfoPage, SandboxSpecNotFoundError, Success
from atoll.service.models import ImagePull, SandboxSpecCreate

router = APIRouter(prefix="/sandbox-specs", tags=["specs"])
SpecPath = Annotated[str, Path(max_length=128)]


@router.get("/search", operation_id="search_sandbox_specs")
async def search(
    caller: Reader, services: Services_, page_id: PageId = None, limit: Limit = 100
) -> SandboxSpecInfoPage:
    """Everybody's specs and the caller's own, by id."""
    return await services.specs.search_sandbox_specs(caller, page_id, limit)


@router.get("", operation_id="batch_get_sandbox_specs")
async def batch_get(
    caller: Reader, services: Services_, id: Annotated[list[str], Query(min_length=1, max_length=100)]
) -> list[SandboxSpecInfo | None]:
    """Several at once, in the order asked for; null for what is not there."""
    return await services.specs.batch_get_sandbox_specs(caller, id)


@router.get("/default", operation_id="get_default_sandbox_spec")
async def default(caller: Reader, services: Services_) -> SandboxSpecInfo:
    """The one for sandboxes that name none."""
    return await services.specs.get_default_sandbox_spec(caller)


@router.post("", operation_id="create_sandbox_spec", status_code=201)
async def create(caller: Manager, services: Services_, wanted: SandboxSpecCreate) -> SandboxSpecInfo:
    """A new spec. Its image is fetched in the background: `image_status` says how far that is."""
    return await services.specs.create_sandbox_spec(caller, wanted)


@router.get("/{spec_id}", operation_id="get_sandbox_spec")
async def get(caller: Reader, services: Services_, spec_id: SpecPath) -> SandboxSpecInfo:
    found = await services.specs.get_sandbox_spec(caller, spec_id)
    if found is None:
        raise SandboxSpecNotFoundError(f"Sandbox Spec not found: {spec_id!r}")
    return found


@router.post("/{spec_id}/pull", operation_id="pull_sandbox_spec")
async def pull(
    caller: Manager, services: Services_, spec_id: SpecPath, wanted: Annotated[ImagePull | None, Body()] = None
) -> SandboxSpecInfo:
    """Fetch or build its image now, or again after a failure. Answers at once; ask for the spec to see its
    `image_progress`."""
    return await services.specs.pull_sandbox_spec(caller, spec_id, (wanted or ImagePull()).registry_login)


@router.delete("/{spec_id}", operation_id="delete_sandbox_spec")
async def delete(caller: Manager, services: Services_, spec_id: SpecPath) -> Success:
    """Sandboxes that were made from it stay."""
    if not await services.specs.delete_sandbox_spec(caller, spec_id):
        raise SandboxSpecNotFoundError(f"Sandbox Spec not found: {spec_id!r}")
    return Success()
