"""What a sandbox may reach, and what was refused to it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, ConfigDict

from atoll.network.policy import NetworkPolicy, parse_policy, with_secrets, without_secrets
from atoll.server.auth import Manager, SandboxReader, Services_
from atoll.server.routes.sandboxes import SandboxId
from atoll.service import Success

router = APIRouter(prefix="/sandboxes/{sandbox_id}/network", tags=["network"])


class NetworkChange(BaseModel):
    model_config = ConfigDict(extra="forbid")
    policy: Annotated[NetworkPolicy, BeforeValidator(parse_policy)]


class RefusalInfo(BaseModel):
    model_config = ConfigDict(from_attributes=True)
    time: float
    protocol: str
    destination: str
    name: str
    rule: str
    dropped: int = 0
    process: str = ""
    """`name[pid]` inside the sandbox, if it is known."""


class NetworkInfo(BaseModel):
    policy: NetworkPolicy
    refusals: list[RefusalInfo]
    """Oldest first."""


@router.get("", operation_id="get_sandbox_network")
async def get(caller: SandboxReader, services: Services_, sandbox_id: SandboxId) -> NetworkInfo:
    """The policy, and what it refused."""
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    if sandbox.spec.network == "none":
        return NetworkInfo(policy="none", refusals=[])
    refusals = [RefusalInfo.model_validate(each) for each in await sandbox.network_log()]
    return NetworkInfo(policy=without_secrets(sandbox.spec.network), refusals=refusals)


@router.put("", operation_id="set_sandbox_network")
async def put(caller: Manager, services: Services_, sandbox_id: SandboxId, wanted: NetworkChange) -> Success:
    """Change it while the sandbox runs. Connections that are no longer allowed end. Values that are never shown may be
    sent back as they were shown: they stay."""
    services.sandboxes.specs.check_network(caller, wanted.policy)
    sandbox = await services.sandboxes.sandbox(caller, sandbox_id)
    await sandbox.set_network(with_secrets(wanted.policy, sandbox.spec.network))
    return Success()
