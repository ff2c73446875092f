"""API keys and tokens: one's own, and everybody's for administrators."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from atoll.server.auth import KeyMaker, Services_
from atoll.service import Scope, Success
from atoll.service.identity import ORDINARY
from atoll.store import ApiKey

router = APIRouter(tags=["keys"])


class KeyInfo(BaseModel):
    id: str
    user_id: str
    name: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    parent_id: str | None = None
    """The key with which this one was made."""


class NewKey(KeyInfo):
    key: str
    """Shown this once; only its hash is kept."""


class KeyCreate(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1, max_length=128)] = "unnamed"
    user_id: Annotated[str, Field(max_length=256)] | None = None
    """Whose; default: the caller's. Only administrators make keys for others."""
    scopes: Annotated[list[Scope], Field(min_length=1)] | None = None
    """Default: what the caller has, but for admin."""
    expires_at: AwareDatetime | None = None
    """At the latest when the credential of the request expires, which is the default."""


class TokenCreate(BaseModel):
    model_config = ConfigDict(extra="forbid")
    scopes: Annotated[list[Scope], Field(min_length=1)] | None = None
    lifetime_s: Annotated[float, Field(gt=0, le=86400)] = 3600


class Token(BaseModel):
    token: str
    expires_at: datetime


@router.get("/keys", operation_id="list_keys")
async def keys(caller: KeyMaker, services: Services_) -> list[KeyInfo]:
    """The caller's keys, without their secrets; an administrator sees everybody's."""
    return [KeyInfo.model_validate(_info(key)) for key in await services.identities.keys(caller)]


@router.post("/keys", operation_id="create_key", status_code=201)
async def create(caller: KeyMaker, services: Services_, wanted: KeyCreate) -> NewKey:
    """A new key, which can do no more than the caller's credential and expires no later."""
    scopes = frozenset(wanted.scopes) if wanted.scopes else caller.scopes & ORDINARY
    key, text = await services.identities.create_key(
        caller, user_id=wanted.user_id, name=wanted.name, scopes=scopes, expires_at=wanted.expires_at
    )
    return NewKey.model_validate({**_info(key), "key": text})


@router.delete("/keys/{key_id}", operation_id="revoke_key")
async def revoke(
    caller: KeyMaker, services: Services_, key_id: Annotated[str, Path(pattern="^[0-9a-f]{1,32}$")]
) -> Success:
    """Revoke a key, at once, together with the keys, tokens, session keys and port links that its user made with it."""
    await services.identities.revoke_key(caller, key_id)
    return Success()


@router.post("/tokens", operation_id="create_token", status_code=201)
async def token(caller: KeyMaker, services: Services_, wanted: TokenCreate) -> Token:
    """A token for a while, for a page or a program that should not have the key."""
    scopes = frozenset(wanted.scopes) if wanted.scopes else caller.scopes & ORDINARY
    text, expires = services.identities.create_token(caller, scopes=scopes, lifetime_s=wanted.lifetime_s)
    return Token(token=text, expires_at=expires)


def _info(key: ApiKey) -> dict[str, object]:
    return {**key.model_dump(exclude={"hash"}), "scopes": list(key.scopes)}
