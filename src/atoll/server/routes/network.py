"""The network policy of a sandbox, and what it has refused."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, ConfigDict

from atoll.model.network_policy import NetworkPolicy, parse_policy, with_secrets, without_secrets
from atoll.server.middleware.auth import AppServices, ManageScope, SandboxReadScope
from atoll.server.routes.openapi_parts import SandboxId
from atoll.service.models.request_model import RequestModel

router = APIRouter(prefix="/sandboxes/{sandbox_id}/network", tags=["network"])


class NetworkRequest(RequestModel):
    """The network policy to set."""

    of = "a change of the network"
    policy: Annotated[NetworkPolicy, BeforeValidator(parse_policy)]
    """What the sandbox may reach: `none`, `all` or rules."""


class RefusalInfo(BaseModel):
    """A connection, request or name lookup that the policy refused."""

    model_config = ConfigDict(from_attributes=True)
    time: datetime
    """When it was refused."""
    protocol: str
    """The protocol."""
    destination: str
    """The address and port."""
    name: str
    """The host name, if it is known."""
    rule: str
    """The rule that refused it."""
    dropped: int = 0
    """How many further refusals are not listed."""
    process: str = ""
    """The process inside as `name[pid]`, if it is known."""


class NetworkInfo(BaseModel):
    """The network policy of a sandbox, and what it refused."""

    policy: NetworkPolicy
    """What the sandbox may reach."""
    refusals: list[RefusalInfo]
    """What was refused, oldest first."""


@router.get("", operation_id="get_sandbox_network", summary="Get the network policy of a sandbox")
async def get(caller: SandboxReadScope, services: AppServices, sandbox_id: SandboxId) -> NetworkInfo:
    """Return what the sandbox may reach, and the connections and requests that were refused."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    if sandbox.spec.network == "none":
        return NetworkInfo(policy="none", refusals=[])
    refusals = [RefusalInfo.model_validate(each) for each in await sandbox.network_log()]
    return NetworkInfo(policy=without_secrets(sandbox.spec.network), refusals=refusals)


@router.put("", operation_id="set_sandbox_network", summary="Change the network policy of a sandbox", status_code=204)
async def put(caller: ManageScope, services: AppServices, sandbox_id: SandboxId, wanted: NetworkRequest) -> None:
    """Change what a running sandbox may reach. Connections that are no longer allowed are closed. Secret values, which
    are never shown, can be sent back as they were shown; they keep their value."""
    services.sandboxes.specs.check_network(caller, wanted.policy)
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    await sandbox.set_network(with_secrets(wanted.policy, sandbox.spec.network))
