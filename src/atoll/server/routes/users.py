"""Users, their roles and quotas. For administrators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from atoll.server.auth import Admin, Services_
from atoll.server.routes.sandboxes import Limit, PageId
from atoll.store import Quotas, Role, User

router = APIRouter(prefix="/users", tags=["users"])
UserId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@|:+-]{0,255}$")]


class UserPage(BaseModel):
    items: list[User]
    next_page_id: str | None = None


class UserCreate(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: UserId
    role: Role = Role.USER
    quotas: Quotas = Quotas()


class UserChange(BaseModel):
    """What is left out stays as it is."""

    model_config = ConfigDict(extra="forbid")
    role: Role | None = None
    quotas: Quotas | None = None
    disabled: bool | None = None
    identity: Annotated[str, Field(pattern=r"^[^|*]+\|.+$", max_length=600)] | None = None
    """The name of this user at the identity provider, as `ISSUER|SUBJECT`. Whoever logs in there under that name is
    this user from then on."""


@router.get("", operation_id="list_users")
async def users(caller: Admin, services: Services_, page_id: PageId = None, limit: Limit = 100) -> UserPage:
    """By id."""
    found = await services.identities.users(page_id or "", limit + 1)
    return UserPage(items=found[:limit], next_page_id=found[limit - 1].id if len(found) > limit else None)


@router.post("", operation_id="create_user", status_code=201)
async def create(caller: Admin, services: Services_, wanted: UserCreate) -> User:
    return await services.identities.create_user(wanted.id, wanted.role, wanted.quotas)


@router.patch("/{user_id}", operation_id="change_user")
async def change(
    caller: Admin, services: Services_, user_id: Annotated[str, Path(max_length=256)], wanted: UserChange
) -> User:
    """Change the role, the quotas, the identity at the identity provider, or whether the user is locked out. The
    change takes effect at once."""
    if wanted.identity is not None:
        await services.identities.link_user(user_id, wanted.identity)
    return await services.identities.change_user(
        user_id, role=wanted.role, quotas=wanted.quotas, disabled=wanted.disabled
    )
