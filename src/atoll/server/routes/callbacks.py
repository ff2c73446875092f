"""Messages from programs inside sandboxes, in the shape in which OpenHands's agent server posts them."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Header, Path, Request
from starlette.exceptions import HTTPException

from atoll.server.middleware.auth import SESSION_HEADER, AppServices, take_in
from atoll.server.routes.openapi_parts import SandboxId, Success, json_body
from atoll.server.services import Services
from atoll.service.callback_messages import MAX_BODY

router = APIRouter(prefix="/webhooks", tags=["callbacks"])
SessionKey = Annotated[str, Header(alias=SESSION_HEADER, max_length=512, description="The session key of the sandbox.")]
ConversationId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="The id of the conversation.")]


@router.post(
    "/{sandbox_id}/conversations",
    operation_id="post_conversation",
    summary="Report a conversation",
    openapi_extra=json_body({"type": "object"}),
)
async def conversation(request: Request, services: AppServices, sandbox_id: SandboxId, key: SessionKey = "") -> Success:
    """Report, from inside a sandbox, that a conversation has started or changed. It is kept as an event of the sandbox.
    The credential is the sandbox's session key, which is valid while the sandbox runs."""
    found = await _read(request, services, sandbox_id, key)
    if not isinstance(found, dict):
        raise ValueError("the body must be a JSON object")
    await services.sandboxes.callbacks.keep(sandbox_id, _word(found.get("id")), [found])
    return Success()


@router.post(
    "/{sandbox_id}/events/{conversation_id}",
    operation_id="post_conversation_events",
    summary="Report events of a conversation",
    openapi_extra=json_body({"type": "array", "items": {"type": "object"}}),
)
async def events(
    request: Request,
    services: AppServices,
    sandbox_id: SandboxId,
    conversation_id: ConversationId,
    key: SessionKey = "",
) -> Success:
    """Report, from inside a sandbox, what happened in a conversation. Each item is kept as an event of the sandbox;
    items longer than 16 KiB are cut."""
    found = await _read(request, services, sandbox_id, key)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ValueError("the body must be a JSON list of objects")
    await services.sandboxes.callbacks.keep(sandbox_id, conversation_id, found)
    return Success()


@router.get("/secrets", operation_id="get_webhook_secret", summary="Get a secret", response_model=None)
async def secret() -> None:
    """Always answers 404: this server keeps no secrets for programs in sandboxes."""
    raise HTTPException(404, "No such provider")


async def _read(request: Request, services: Services, sandbox_id: str, key: str) -> object:
    """Return the body, if the caller has the sandbox's key. Nothing is read from anybody else."""
    take_in(request, await services.sandboxes.callbacks.admit(sandbox_id, key))
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise HTTPException(413, f"the body may have at most {MAX_BODY} bytes", {"Connection": "close"})
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("the body is not valid JSON") from error


def _word(value: object) -> str:
    text = str(value)[:64] if isinstance(value, str | int) else ""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_-") else "_" for letter in text)
