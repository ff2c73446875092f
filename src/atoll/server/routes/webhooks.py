"""Being told what happens, and telling: messages between servers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Request
from pydantic import BaseModel, ConfigDict, Field

from atoll.engines.base import Reachable
from atoll.server.auth import Manager, Reader, Services_
from atoll.server.webhooks import Webhook
from atoll.service import NotAuthenticatedError, Success
from atoll.signature import HEADER

router = APIRouter(tags=["webhooks"])
RECEIVE = "/engine-events"


class Lease(BaseModel):
    model_config = ConfigDict(extra="forbid")
    url: Annotated[str, Field(min_length=8, max_length=2048)]
    """Where to post. It must be public, unless the server's settings name its host."""
    secret: Annotated[str, Field(pattern=r"^([0-9a-f]{2}){32,128}$")]
    """With which messages are signed, in hexadecimal."""
    lease_s: Annotated[float, Field(ge=1, le=600)] = 120
    """Renew it before, or it ends."""
    after: Annotated[int, Field(ge=0, le=1 << 53)] | None = None
    """The number of the last event that is known already. Default: only what comes."""


class WebhookInfo(BaseModel):
    id: str
    url: str
    expires_in_s: float
    failing: bool
    """Whether the last message was not taken. It is tried again."""
    delivered: int
    """Events so far."""


class Heard(BaseModel):
    challenge: str | None = None


@router.put("/webhooks", operation_id="lease_webhook")
async def lease(caller: Manager, services: Services_, wanted: Lease) -> WebhookInfo:
    """Have the events of your sandboxes posted to a URL, signed. The first message is a challenge that it must answer
    with; the same URL and secret again renew the lease."""
    secret = bytes.fromhex(wanted.secret)
    hook = await services.webhooks.lease(caller, wanted.url, secret, wanted.lease_s, wanted.after)
    return _info(hook)


@router.get("/webhooks", operation_id="list_webhooks")
async def webhooks(caller: Reader, services: Services_) -> list[WebhookInfo]:
    """Yours."""
    return [_info(hook) for hook in services.webhooks.of(caller)]


@router.delete("/webhooks/{webhook_id}", operation_id="delete_webhook")
async def delete(
    caller: Manager, services: Services_, webhook_id: Annotated[str, Path(pattern=r"^[0-9a-f]{1,64}$")]
) -> Success:
    await services.webhooks.remove(caller, webhook_id)
    return Success()


@router.post(
    RECEIVE,
    operation_id="receive_engine_events",
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}},
    },
)
async def receive(
    request: Request, services: Services_, signature: Annotated[str, Header(alias=HEADER, max_length=512)] = ""
) -> Heard:
    """From the server that is this one's engine. Its signature is the credential."""
    if not isinstance(services.engine, Reachable):
        raise NotAuthenticatedError("the engine of this server is on its own machine: nobody is expected here")
    return Heard(challenge=services.engine.receive(signature, await request.body()))


def _info(hook: Webhook) -> WebhookInfo:
    return WebhookInfo(
        id=hook.id,
        url=hook.url,
        expires_in_s=round(max(0.0, hook.left_s), 3),
        failing=hook.failing,
        delivered=hook.delivered,
    )
