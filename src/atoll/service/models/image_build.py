"""Builds of images: as they are requested and as they are shown."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Base64Bytes, BaseModel, BeforeValidator, Field

from atoll.images import Image
from atoll.model import Limits
from atoll.model.network_policy import NetworkPolicy, parse_policy
from atoll.service.models.request_model import RequestModel
from atoll.service.models.sandbox_request import RegistryLogin

BuildState = Literal["queued", "running", "done", "failed", "cancelled"]
ArgumentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
ArgumentValue = Annotated[str, Field(max_length=65_536)]
SecretValue = Annotated[Base64Bytes, Field(max_length=1 << 20)]
LabelName = Annotated[str, Field(min_length=1, max_length=256)]
LabelValue = Annotated[str, Field(max_length=4096)]
SecretId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
_MAX_DOCKERFILE = 1 << 20


class ImageBuildRequest(RequestModel):
    """What to build. Only the names of `args` and `secrets` are stored and shown, never their values."""

    of = "a build"
    name: Annotated[str, Field(max_length=512)] = ""
    """The name of the image, such as `mine` or `team/mine:1`. Default: a name made from its digest."""
    dockerfile: Annotated[str, Field(min_length=1, max_length=4096)] = "Dockerfile"
    """The path of the Dockerfile in the context."""
    dockerfile_text: Annotated[str, Field(max_length=_MAX_DOCKERFILE)] | None = None
    """The Dockerfile itself, in place of one in the context."""
    args: Annotated[dict[ArgumentName, ArgumentValue], Field(max_length=256)] = Field(default_factory=dict, repr=False)
    """Values of `ARG` instructions."""
    secrets: Annotated[dict[SecretId, SecretValue], Field(max_length=64)] = Field(default_factory=dict, repr=False)
    """Contents for `RUN --mount=type=secret`, by id, in base64."""
    labels: Annotated[dict[LabelName, LabelValue], Field(max_length=64)] = Field(default_factory=dict)
    """Labels of the image, beside those of the Dockerfile, over which they win."""
    target: Annotated[str, Field(max_length=128)] = ""
    """The stage to build. Default: the last one."""
    no_cache: bool = False
    """Whether to carry out every step again."""
    network: Annotated[NetworkPolicy | None, BeforeValidator(lambda value: value and parse_policy(value))] = None
    """What `RUN` may reach: `none`, `all` or rules. Default: what the server's operator allows builds. Only
    administrators may open private address ranges."""
    limits: Limits = Limits()
    """What each sandbox of the build may use."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """How many seconds the build may take. Default and maximum: those of the server."""
    registry_login: RegistryLogin | None = None
    """A login for a base image that is not public. It is not stored."""


class BuildFailure(BaseModel):
    """Why a build failed."""

    code: str
    """A stable name of the error, for programs."""
    detail: str
    """What went wrong."""
    hint: str | None = None
    """What to do about it."""
    step: int | None = None
    """The number of the step that failed."""
    place: str | None = None
    """FILE:LINE of its instruction."""
    instruction: str | None = None
    """The instruction."""
    exit_code: int | None = None
    """The exit code of its command."""
    cause: str | None = None
    """Why its command ended."""
    output: str | None = None
    """The last lines that it wrote."""


class BuiltImageInfo(BaseModel):
    """An image that was built, and what it says about sandboxes that are made from it."""

    name: str
    """Its name, with which sandboxes start from it."""
    digest: str
    """The digest of its files."""
    size_bytes: int
    """The size of its files."""
    created_at: datetime
    """When it was stored."""
    env: dict[str, str] = {}
    """Environment variables."""
    entrypoint: list[str] = []
    """The program that its author meant to be run."""
    command: list[str] = []
    """Arguments for it, or the program itself."""
    work_dir: str = ""
    """The directory where commands start."""
    user: str = ""
    """The user who runs commands."""
    labels: dict[str, str] = {}
    """Labels of its author."""
    exposed_ports: list[str] = []
    """Ports on which its programs listen, such as `8000/tcp`."""
    volumes: list[str] = []
    """Paths that its author declared as volumes. They are only noted."""
    stop_signal: str = ""
    """The signal that ends its program."""
    shell: list[str] = []
    """What runs command lines of a Dockerfile. Empty: `/bin/sh -c`."""
    healthcheck: dict[str, Any] = {}
    """The health check, as in an OCI configuration."""

    @classmethod
    def of(cls, image: Image) -> BuiltImageInfo:
        config = asdict(image.config)
        config["command"] = config.pop("cmd")
        return cls(
            name=image.reference,
            digest=image.digest,
            size_bytes=image.size_bytes,
            created_at=datetime.fromtimestamp(image.created_at, UTC),
            **{name: value for name, value in config.items() if name in cls.model_fields},
        )


class ImageBuildInfo(BaseModel):
    """A build of an image."""

    id: str
    """The id of the build."""
    owner_id: str
    """The user whom the build and its image belong to."""
    name: str
    """The name that was asked for. Empty: none."""
    state: BuildState
    """`queued` until it is its turn, then `running`, and finally `done`, `failed` or `cancelled`."""
    created_at: datetime
    """When it was requested."""
    started_at: datetime | None = None
    """When it was its turn."""
    ended_at: datetime | None = None
    """When it ended."""
    stage: str = ""
    """The stage that the latest step belongs to."""
    step: int = 0
    """The number of the latest step, from 1 on. 0: no step has begun."""
    steps: int = 0
    """How many steps there are. 0: not known yet."""
    cached_steps: int = 0
    """How many of them were taken from the cache."""
    args: list[str] = []
    """The names of the arguments."""
    secrets: list[str] = []
    """The ids of the secrets."""
    target: str = ""
    """The stage to build. Empty: the last one."""
    no_cache: bool = False
    """Whether the cache is not used."""
    log_bytes: int = 0
    """How long the log is. Reading can continue from there."""
    error: BuildFailure | None = None
    """Why it failed."""
    image: BuiltImageInfo | None = None
    """What was built."""


class ImageBuildPage(BaseModel):
    """One page of builds."""

    items: list[ImageBuildInfo]
    """The builds of this page, newest first."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""
