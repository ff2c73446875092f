"""Users, their roles and quotas. For administrators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, Field

from atoll.server.middleware.auth import AdminScope, AppServices
from atoll.server.routes.openapi_parts import CREATED, Limit, PageId, locate
from atoll.service.models.request_model import RequestModel
from atoll.store import Quotas, Role, User

router = APIRouter(prefix="/users", tags=["users"])
UserId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@|:+-]{0,255}$")]

UserPath = Annotated[str, Path(max_length=256, description="The id of the user.")]


class UserPage(BaseModel):
    """One page of users."""

    items: list[User]
    """The users of this page."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""


class UserRequest(RequestModel):
    """The user to create."""

    of = "a user"
    id: UserId
    """The id of the new user."""
    role: Role = Role.USER
    """The role of the user."""
    quotas: Quotas = Quotas()
    """What the user may have."""


class UserChangeRequest(RequestModel):
    """What to change. Fields that are left out stay as they are."""

    of = "a change of a user"
    role: Role | None = None
    """The new role."""
    quotas: Quotas | None = None
    """The new quotas; they replace the old ones."""
    disabled: bool | None = None
    """Whether the user is locked out."""
    identity: Annotated[str, Field(pattern=r"^[^|*]+\|.+$", max_length=600)] | None = None
    """The user's name at the identity provider, as `ISSUER|SUBJECT`. From then on, whoever logs in under that name is
    this user."""


@router.get("", operation_id="list_users", summary="List users")
async def users(caller: AdminScope, services: AppServices, page_id: PageId = None, limit: Limit = 100) -> UserPage:
    """Return the users of the server, sorted by id, one page at a time."""
    found = await services.users.list(page_id or "", limit + 1)
    return UserPage(items=found[:limit], next_page_id=found[limit - 1].id if len(found) > limit else None)


@router.post("", operation_id="create_user", summary="Create a user", status_code=201, responses=CREATED)
async def create(caller: AdminScope, services: AppServices, wanted: UserRequest, response: Response) -> User:
    """Create a user with a role and quotas."""
    made = await services.users.create(wanted.id, wanted.role, wanted.quotas)
    locate(response, f"/users/{made.id}")
    return made


@router.get("/{user_id}", operation_id="get_user", summary="Get a user")
async def get(caller: AdminScope, services: AppServices, user_id: UserPath) -> User:
    """Return one user with the role and the quotas."""
    return await services.users.get(user_id)


@router.patch("/{user_id}", operation_id="change_user", summary="Change a user")
async def change(
    caller: AdminScope,
    services: AppServices,
    user_id: UserPath,
    wanted: UserChangeRequest,
) -> User:
    """Change a user's role, quotas or identity at the identity provider, or lock the user out. The change takes effect
    at once."""
    if wanted.identity is not None:
        await services.users.link(user_id, wanted.identity)
    return await services.users.change(user_id, role=wanted.role, quotas=wanted.quotas, disabled=wanted.disabled)
