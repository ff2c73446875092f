"""Specs of the catalogue: as they are created and shown, and the state of their images."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from atoll.model import Limits
from atoll.service.models.exposed_port import ExposedPort, HealthCheck
from atoll.service.models.request_model import RequestModel
from atoll.service.models.sandbox_request import RegistryLogin, SandboxSettings

Text = Annotated[str, Field(max_length=4096)]
SpecId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class ImagePullRequest(RequestModel):
    """How to fetch the image of a spec."""

    of = "a pull"
    registry_login: RegistryLogin | None = None
    """A login for an image that is not public."""


class ImageProgressInfo(BaseModel):
    """How far the fetching of a spec's image has come."""

    model_config = ConfigDict(from_attributes=True)
    stage: str
    """`wait`, `pull`, `build`, `extract` or `check`."""
    detail: str
    """What is being worked on, such as a layer or a package."""
    done_bytes: int
    """Bytes done in this stage."""
    total_bytes: int | None
    """Bytes of this stage in total. Null while that is unknown."""


class SandboxSpecInfo(BaseModel):
    """A spec of the catalogue."""

    id: str
    """The id of the spec."""
    command: list[str] | None = None
    """A command that starts in the background as soon as a sandbox of this spec exists."""
    created_at: datetime
    """When the spec was created."""
    initial_env: dict[str, str] = {}
    """Environment variables of its sandboxes."""
    working_dir: str = "/workspace"
    """The directory where commands and relative paths start."""
    image: str = "host"
    """The image of its sandboxes."""
    isolation: str | None = None
    """The isolation level of its sandboxes. Null: the server's default."""
    limits: Limits = Limits()
    """What each of its sandboxes may use."""
    exposed_ports: list[ExposedPort] = []
    """The ports that its sandboxes expose."""
    health: HealthCheck | None = None
    """The health check of its sandboxes."""
    callback: bool = False
    """Whether programs inside learn where to post messages, and with which key."""
    owner_id: str | None = None
    """The user whom the spec belongs to. Null: it is shared with everybody."""
    is_default: bool = False
    """Whether sandboxes without a spec are made from this one."""
    image_status: Literal["ready", "pending", "pulling", "failed"] = "ready"
    """Whether the image is on the server. `pending` images are fetched when they are first needed."""
    image_detail: str = ""
    """Why fetching the image failed."""
    image_progress: ImageProgressInfo | None = None
    """How far the image is, while it is being fetched."""


class SandboxSpecInfoPage(BaseModel):
    """One page of specs."""

    items: list[SandboxSpecInfo]
    """The specs of this page."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""


class SandboxSpecRequest(RequestModel):
    """The spec to create."""

    of = "a spec"
    id: SpecId
    """The id of the new spec. Neither the caller nor everybody may have a spec with this id."""
    settings: SandboxSettings = SandboxSettings()
    """What sandboxes of this spec are made from."""
    command: Annotated[list[Text], Field(min_length=1, max_length=256)] | None = None
    """A command to start in the background as soon as a sandbox exists: a program and its arguments."""
    exposed_ports: Annotated[list[ExposedPort], Field(max_length=64)] = Field(default_factory=list)
    """Ports to expose. Each sets a variable inside, `NAME=PORT`."""
    health: HealthCheck | None = None
    """A health check that a new sandbox has to pass before it counts as running."""
    callback: bool = False
    """Whether programs inside learn where to post messages, and with which key."""
    shared: bool = False
    """Whether the spec is for everybody. Only administrators may share one."""
    registry_login: RegistryLogin | None = None
    """A login for an image that is not public, to fetch it now. It is not stored."""
