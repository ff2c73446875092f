"""API keys and tokens: users manage their own, administrators those of all users."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import AwareDatetime, BaseModel, Field

from atoll.server.middleware.auth import AppServices, KeysScope
from atoll.server.routes.openapi_parts import Limit, PageId
from atoll.server.routes.paging import page
from atoll.service import Scope
from atoll.service.caller import ORDINARY
from atoll.service.models.request_model import RequestModel
from atoll.store import ApiKey

router = APIRouter(tags=["keys"])


_LIFETIME = {"lifetime_s": "lifetime"}


class KeyInfo(BaseModel):
    """An API key without its secret."""

    id: str
    """The id of the key."""
    user_id: str
    """The user whom the key belongs to."""
    name: str
    """The name of the key."""
    scopes: list[str]
    """What the key may do."""
    created_at: datetime
    """When the key was created."""
    expires_at: datetime | None
    """When the key expires. Null: never."""
    revoked_at: datetime | None
    """When the key was revoked."""
    parent_id: str | None = None
    """The key that this one was created with."""


class KeyPage(BaseModel):
    """One page of API keys."""

    items: list[KeyInfo]
    """The keys of this page, newest first."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""


class NewKey(KeyInfo):
    """A new API key."""

    key: str
    """The key itself. It is shown this once; the server keeps only a hash."""


class KeyRequest(RequestModel):
    """The API key to create."""

    of = "a key"
    name: Annotated[str, Field(min_length=1, max_length=128)] = "unnamed"
    """A name to recognize the key by."""
    user_id: Annotated[str, Field(max_length=256)] | None = None
    """The user whom the key is for. Default: the caller. Only administrators may create keys for others."""
    scopes: Annotated[list[Scope], Field(min_length=1)] | None = None
    """What the key may do. Default: the caller's scopes without `admin`."""
    expires_at: AwareDatetime | None = None
    """When the key expires. At the latest, and by default, when the caller's credential does."""


class TokenRequest(RequestModel):
    """The token to create."""

    of = "a token"
    other_names = _LIFETIME
    scopes: Annotated[list[Scope], Field(min_length=1)] | None = None
    """What the token may do. Default: the caller's scopes without `admin`."""
    lifetime: Annotated[float, Field(gt=0, le=86400)] = 3600
    """Seconds until the token expires."""


class Token(BaseModel):
    """A new token."""

    token: str
    """The token itself."""
    expires_at: datetime
    """When the token expires."""


@router.get("/keys", operation_id="list_keys", summary="List API keys")
async def keys(caller: KeysScope, services: AppServices, page_id: PageId = None, limit: Limit = 100) -> KeyPage:
    """Return the caller's API keys without their secrets, one page at a time. Administrators see the keys of all
    users."""
    listed = await services.users.keys(caller)
    found, more = page(listed, lambda key: (-key.created_at.timestamp(), key.id), page_id, limit)
    return KeyPage(items=[KeyInfo.model_validate(_info(key)) for key in found], next_page_id=more)


@router.post("/keys", operation_id="create_key", summary="Create an API key", status_code=201)
async def create(caller: KeysScope, services: AppServices, wanted: KeyRequest) -> NewKey:
    """Create an API key. It has no scopes that the caller's credential does not have, and expires no later."""
    scopes = frozenset(wanted.scopes) if wanted.scopes else caller.scopes & ORDINARY
    key, text = await services.users.create_key(
        caller, user_id=wanted.user_id, name=wanted.name, scopes=scopes, expires_at=wanted.expires_at
    )
    return NewKey.model_validate({**_info(key), "key": text})


@router.delete("/keys/{key_id}", operation_id="revoke_key", summary="Revoke an API key", status_code=204)
async def revoke(
    caller: KeysScope,
    services: AppServices,
    key_id: Annotated[str, Path(pattern="^[0-9a-f]{1,32}$", description="The id of the API key.")],
) -> None:
    """Revoke an API key at once, together with the keys, tokens, session keys and port links that its user made with
    it."""
    await services.users.revoke_key(caller, key_id)


@router.post("/tokens", operation_id="create_token", summary="Create a token", status_code=201)
async def token(caller: KeysScope, services: AppServices, wanted: TokenRequest) -> Token:
    """Create a short-lived token, for a page or program that should not have the API key."""
    scopes = frozenset(wanted.scopes) if wanted.scopes else caller.scopes & ORDINARY
    text, expires = services.identities.tokens.create(caller, scopes=scopes, lifetime_s=wanted.lifetime)
    return Token(token=text, expires_at=expires)


def _info(key: ApiKey) -> dict[str, object]:
    return {**key.model_dump(exclude={"hash"}), "scopes": list(key.scopes)}
