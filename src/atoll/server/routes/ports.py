"""What listens in a sandbox, over HTTP; works with the sandbox's network off."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from atoll.server.auth import SandboxUser, Services_
from atoll.server.proxy import forward
from atoll.server.routes.sandboxes import SandboxId

router = APIRouter(prefix="/sandboxes/{sandbox_id}/ports", tags=["ports"])
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


async def port(
    caller: SandboxUser,
    services: Services_,
    sandbox_id: SandboxId,
    port: Annotated[int, Path(ge=1, le=65535)],
    path: str,
    request: Request,
) -> Response:
    """Handed on to that port of the sandbox, without the caller's credentials. The answer is the sandbox's own."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    return await forward(request, await sandbox.connect_port(port), port, path)


for _method in _METHODS:
    router.add_api_route(
        "/{port}/{path:path}",
        port,
        methods=[_method],
        operation_id=f"port_{_method.lower()}",
        response_class=Response,
        responses={"default": {"description": "What the sandbox answers."}},
    )
