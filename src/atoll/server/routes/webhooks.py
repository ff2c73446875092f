"""Webhooks: events posted to other servers, and those that a remote engine posts to this one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Request
from pydantic import BaseModel, Field

from atoll.engines.contract import Reachable
from atoll.server.middleware.auth import AppServices, ManageScope, ReadScope
from atoll.server.routes.openapi_parts import Limit, PageId, json_body
from atoll.server.routes.paging import page
from atoll.server.webhooks.delivery import Webhook
from atoll.service import NotAuthenticatedError
from atoll.service.models.request_model import RequestModel
from atoll.signature import HEADER

router = APIRouter(tags=["webhooks"])
RECEIVE = "/engine-events"


class WebhookRequest(RequestModel):
    """The webhook to lease."""

    of = "a webhook"
    url: Annotated[str, Field(min_length=8, max_length=2048)]
    """The URL to post to. It must be public unless the server's settings name its host."""
    secret: Annotated[str, Field(pattern=r"^([0-9a-f]{2}){32,128}$")]
    """The secret that messages are signed with, in hexadecimal."""
    lease_s: Annotated[float, Field(ge=1, le=600)] = 120
    """Seconds until the lease ends, unless it is renewed."""
    after: Annotated[int, Field(ge=0, le=1 << 53)] | None = None
    """The number of the last event that is already known. Default: only new events are posted."""


class WebhookInfo(BaseModel):
    """A leased webhook."""

    id: str
    """The id of the webhook."""
    url: str
    """The URL that events are posted to."""
    expires_in_s: float
    """Seconds until the lease ends."""
    failing: bool
    """Whether the last message was not accepted. It is sent again."""
    delivered: int
    """How many events were delivered so far."""


class WebhookPage(BaseModel):
    """One page of webhooks."""

    items: list[WebhookInfo]
    """The webhooks of this page, sorted by id."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""


class Heard(BaseModel):
    """The answer to a message of a remote engine."""

    challenge: str | None = None
    """The challenge of the message, if it had one."""


@router.put("/webhooks", operation_id="lease_webhook", summary="Lease a webhook")
async def lease(caller: ManageScope, services: AppServices, wanted: WebhookRequest) -> WebhookInfo:
    """Have the events of the caller's sandboxes posted to a URL, signed. The first message is a challenge that the URL
    must answer with. The same URL and secret again renew the lease."""
    secret = bytes.fromhex(wanted.secret)
    hook = await services.webhooks.lease(caller, wanted.url, secret, wanted.lease_s, wanted.after)
    return _info(hook)


@router.get("/webhooks", operation_id="list_webhooks", summary="List webhooks")
async def webhooks(caller: ReadScope, services: AppServices, page_id: PageId = None, limit: Limit = 100) -> WebhookPage:
    """Return the caller's webhooks, one page at a time."""
    found, more = page(services.webhooks.of(caller), lambda hook: (0.0, hook.id), page_id, limit)
    return WebhookPage(items=[_info(hook) for hook in found], next_page_id=more)


@router.delete("/webhooks/{webhook_id}", operation_id="delete_webhook", summary="Delete a webhook", status_code=204)
async def delete(
    caller: ManageScope,
    services: AppServices,
    webhook_id: Annotated[str, Path(pattern=r"^[0-9a-f]{1,64}$", description="The id of the webhook.")],
) -> None:
    """Stop posting events to a URL."""
    await services.webhooks.remove(caller, webhook_id)


@router.post(
    RECEIVE,
    operation_id="receive_engine_events",
    summary="Receive events of a remote engine",
    openapi_extra=json_body({"type": "object"}),
)
async def receive(
    request: Request,
    services: AppServices,
    signature: Annotated[str, Header(alias=HEADER, max_length=512, description="The signature of the body.")] = "",
) -> Heard:
    """Take in events from the server that this one uses as its engine. Their signature is the credential."""
    if not isinstance(services.engine, Reachable):
        raise NotAuthenticatedError("the engine of this server runs on the same machine: no events are accepted")
    return Heard(challenge=services.engine.receive(signature, await request.body()))


def _info(hook: Webhook) -> WebhookInfo:
    return WebhookInfo(
        id=hook.id,
        url=hook.url,
        expires_in_s=round(max(0.0, hook.left_s), 3),
        failing=hook.failing,
        delivered=hook.delivered,
    )
