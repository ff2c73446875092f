"""Messages from programs inside sandboxes, in the shape in which OpenHands's agent server posts them."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request
from starlette.exceptions import HTTPException

from atoll.server.auth import SESSION_HEADER, Services_, take_in
from atoll.server.routes.sandboxes import SandboxId
from atoll.server.services import Services
from atoll.service import Success
from atoll.service.callbacks import MAX_BODY

router = APIRouter(prefix="/webhooks", tags=["callbacks"])
SessionKey = Annotated[str, Header(alias=SESSION_HEADER, max_length=512)]
ConversationId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@router.post("/{sandbox_id}/conversations", operation_id="post_conversation", openapi_extra=_body({"type": "object"}))
async def conversation(request: Request, services: Services_, sandbox_id: SandboxId, key: SessionKey = "") -> Success:
    """A conversation in this sandbox has begun or changed. Kept as an event of the sandbox; its session key is the
    credential, and only while the sandbox runs."""
    found = await _read(request, services, sandbox_id, key)
    if not isinstance(found, dict):
        raise ValueError("the body must be an object")
    await services.sandboxes.callbacks.keep(sandbox_id, _word(found.get("id")), [found])
    return Success()


@router.post(
    "/{sandbox_id}/events/{conversation_id}",
    operation_id="post_conversation_events",
    openapi_extra=_body({"type": "array", "items": {"type": "object"}}),
)
async def events(
    request: Request, services: Services_, sandbox_id: SandboxId, conversation_id: ConversationId, key: SessionKey = ""
) -> Success:
    """What happened in a conversation. Each item is kept as an event of the sandbox, cut if longer than 16 KiB."""
    found = await _read(request, services, sandbox_id, key)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ValueError("the body must be a list of objects")
    await services.sandboxes.callbacks.keep(sandbox_id, conversation_id, found)
    return Success()


@router.get("/secrets", operation_id="get_webhook_secret", response_model=None)
async def secret() -> None:
    """There are no secrets on this server yet: always 404."""
    raise HTTPException(404, "No such provider")


async def _read(request: Request, services: Services, sandbox_id: str, key: str) -> object:
    """The body, of whoever has the sandbox's key: nothing is read for anybody else."""
    take_in(request, await services.sandboxes.callbacks.admit(sandbox_id, key))
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY:
            raise HTTPException(413, f"at most {MAX_BODY} bytes are taken", {"Connection": "close"})
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError("the body is not JSON") from error


def _word(value: object) -> str:
    text = str(value)[:64] if isinstance(value, str | int) else ""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_-") else "_" for letter in text)
