"""API keys and tokens: users manage their own, administrators those of all users."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from atoll.server.middleware.auth import AppServices, KeysScope
from atoll.server.routes.openapi_parts import Success
from atoll.service import Scope
from atoll.service.caller import ORDINARY
from atoll.store import ApiKey

router = APIRouter(tags=["keys"])


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


class NewKey(KeyInfo):
    """A new API key."""

    key: str
    """The key itself. It is shown this once; the server keeps only a hash."""


class KeyCreate(BaseModel):
    """The API key to create."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1, max_length=128)] = "unnamed"
    """A name to recognize the key by."""
    user_id: Annotated[str, Field(max_length=256)] | None = None
    """The user whom the key is for. Default: the caller. Only administrators may create keys for others."""
    scopes: Annotated[list[Scope], Field(min_length=1)] | None = None
    """What the key may do. Default: the caller's scopes without `admin`."""
    expires_at: AwareDatetime | None = None
    """When the key expires. At the latest, and by default, when the caller's credential does."""


class TokenCreate(BaseModel):
    """The token to create."""

    model_config = ConfigDict(extra="forbid")
    scopes: Annotated[list[Scope], Field(min_length=1)] | None = None
    """What the token may do. Default: the caller's scopes without `admin`."""
    lifetime_s: Annotated[float, Field(gt=0, le=86400)] = 3600
    """Seconds until the token expires."""


class Token(BaseModel):
    """A new token."""

    token: str
    """The token itself."""
    expires_at: datetime
    """When the token expires."""


@router.get("/keys", operation_id="list_keys", summary="List API keys")
async def keys(caller: KeysScope, services: AppServices) -> list[KeyInfo]:
    """Return the caller's API keys without their secrets. Administrators see the keys of all users."""
    return [KeyInfo.model_validate(_info(key)) for key in await services.users.keys(caller)]


@router.post("/keys", operation_id="create_key", summary="Create an API key", status_code=201)
async def create(caller: KeysScope, services: AppServices, wanted: KeyCreate) -> NewKey:
    """Create an API key. It has no scopes that the caller's credential does not have, and expires no later."""
    scopes = frozenset(wanted.scopes) if wanted.scopes else caller.scopes & ORDINARY
    key, text = await services.users.create_key(
        caller, user_id=wanted.user_id, name=wanted.name, scopes=scopes, expires_at=wanted.expires_at
    )
    return NewKey.model_validate({**_info(key), "key": text})


@router.delete("/keys/{key_id}", operation_id="revoke_key", summary="Revoke an API key")
async def revoke(
    caller: KeysScope,
    services: AppServices,
    key_id: Annotated[str, Path(pattern="^[0-9a-f]{1,32}$", description="The id of the API key.")],
) -> Success:
    """Revoke an API key at once, together with the keys, tokens, session keys and port links that its user made with
    it."""
    await services.users.revoke_key(caller, key_id)
    return Success()


@router.post("/tokens", operation_id="create_token", summary="Create a token", status_code=201)
async def token(caller: KeysScope, services: AppServices, wanted: TokenCreate) -> Token:
    """Create a short-lived token, for a page or program that should not have the API key."""
    scopes = frozenset(wanted.scopes) if wanted.scopes else caller.scopes & ORDINARY
    text, expires = services.identities.tokens.create(caller, scopes=scopes, lifetime_s=wanted.lifetime_s)
    return Token(token=text, expires_at=expires)


def _info(key: ApiKey) -> dict[str, object]:
    return {**key.model_dump(exclude={"hash"}), "scopes": list(key.scopes)}
