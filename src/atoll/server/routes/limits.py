"""The limits of a sandbox: see them, and change them while it runs."""

from __future__ import annotations

from fastapi import APIRouter

from atoll.server.middleware.auth import AppServices, ManageScope, SandboxReadScope
from atoll.server.routes.openapi_parts import SandboxId
from atoll.service.models.sandbox_limits import LimitsRequest, SandboxLimits

router = APIRouter(prefix="/sandboxes/{sandbox_id}/limits", tags=["limits"])


@router.get("", operation_id="get_sandbox_limits", summary="Get the limits of a sandbox")
async def get(caller: SandboxReadScope, services: AppServices, sandbox_id: SandboxId) -> SandboxLimits:
    """Return the limits that were requested, those that are enforced, and which can be changed."""
    return await services.sandboxes.limits.get(caller, sandbox_id)


@router.patch("", operation_id="set_sandbox_limits", summary="Change the limits of a sandbox")
async def patch(
    caller: ManageScope, services: AppServices, sandbox_id: SandboxId, wanted: LimitsRequest
) -> SandboxLimits:
    """Change limits while the sandbox runs. Those that are left out stay; of the others all change or none. The same
    maxima and quotas apply as to a new sandbox. A limit below what the sandbox uses now is refused."""
    return await services.sandboxes.limits.change(caller, sandbox_id, wanted.limits())
