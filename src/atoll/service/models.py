"""The values that the service takes and gives, as they go over the wire."""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from atoll import manus
from atoll.checkpoint import Snapshot
from atoll.errors import SpecError
from atoll.manager import CommandEnd, OnIdle, PausedBy
from atoll.model import Cause, Limits, SandboxSpec, SetupCommands, SetupTime, State, UndoRule, Volume
from atoll.network.policy import NetworkPolicy, parse_policy, with_secrets, without_secrets
from atoll.spelling import before, renamed

Text = Annotated[str, Field(max_length=4096)]
Variables = Annotated[dict[Annotated[str, Field(max_length=512)], Annotated[str, Field(max_length=131072)]], Field()]
MAX_SETTINGS = 512 << 10
"""The most characters of the settings of one sandbox or one spec, which are stored more than once."""
_MAX_LABELS = 16 << 10
_LIFE = {"lifetime": "lifetime_s", "timeout": "lifetime_s"}


def _small(labels: dict[str, str]) -> dict[str, str]:
    if sum(len(name) + len(value) for name, value in labels.items()) > _MAX_LABELS:
        raise ValueError(f"labels have at most {_MAX_LABELS:,} characters together")
    return labels


Labels = Annotated[dict[str, str], Field(max_length=64), AfterValidator(_small)]
Lifetime = Annotated[float, Field(gt=0, le=10 * 365 * 86400)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
SpecId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class SandboxStatus(enum.StrEnum):
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    ERROR = "ERROR"
    """It has ended by itself, or its engine cannot say how it is; `cause` and `reason` say more."""
    MISSING = "MISSING"
    """It is gone."""


STATUS = {
    State.STARTING: SandboxStatus.STARTING,
    State.RUNNING: SandboxStatus.RUNNING,
    State.PAUSED: SandboxStatus.PAUSED,
    State.STOPPED: SandboxStatus.ERROR,
    State.ERROR: SandboxStatus.ERROR,
    State.MISSING: SandboxStatus.MISSING,
}


class ExposedPort(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    name: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$")]
    port: Annotated[int, Field(ge=1, le=65535)]
    public: bool = False
    """Whoever has the URL reaches it, without any credential."""


class HealthCheck(BaseModel):
    """The sandbox is STARTING until a GET of this path is answered with 2xx, and in ERROR if it is not in time."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: Annotated[str, Field(pattern=r"^/[\x21-\x7e]{0,399}$")] = "/health"
    port: Annotated[str, Field(max_length=63)] | Annotated[int, Field(ge=1, le=65535)] = "AGENT_SERVER"
    """The name of one of its exposed ports, or a number."""
    grace_s: Annotated[float, Field(gt=0, le=3600)] = 15.0
    """How long it may take until it is an error."""


class ExposedUrl(BaseModel):
    """Where something that listens in the sandbox can be reached, with the rights of the sandbox."""

    name: str
    url: str
    """By path: what comes from there is shown by a browser without any origin."""
    port: int
    host_url: str | None = None
    """By host name: an origin of its own, with cookies and storage. None where no such name leads to this server."""
    public: bool = False


class ResourcesInUse(BaseModel):
    """Null for what the engine cannot know."""

    model_config = ConfigDict(from_attributes=True)
    memory_bytes: int | None
    cpu_s: float | None
    pids: int | None
    disk_bytes: int | None


class CommandEndInfo(BaseModel):
    """How the command of a sandbox's spec ended. All of its output is that of the command `spec-command`."""

    exit_code: int | None
    """As a shell reports it. Null if the sandbox was started again without the command."""
    cause: Cause
    output: str
    """The end of its output."""
    ended_at: datetime

    @classmethod
    def of(cls, end: CommandEnd) -> CommandEndInfo:
        moment = datetime.fromtimestamp(end.at, UTC)
        return cls(exit_code=end.exit_code, cause=end.cause, output=end.output, ended_at=moment)


class SandboxInfo(BaseModel):
    id: str
    created_by_user_id: str | None
    sandbox_spec_id: str
    status: SandboxStatus
    session_api_key: str | None
    """Sent as X-Session-API-Key it stands for this sandbox alone. Only while it is RUNNING."""
    exposed_urls: list[ExposedUrl] | None = []
    created_at: datetime
    name: str | None = None
    labels: dict[str, str] = {}
    state: State
    """As the manager knows it: tells STOPPED from ERROR."""
    cause: Cause | None = None
    reason: str = ""
    engine: str
    image: str
    isolation: str | None = None
    work_dir: str
    limits: Limits
    """The limits that were asked for."""
    effective_limits: Limits = Limits()
    """The limits that are enforced: those asked for, and defaults."""
    limits_left_out: list[str] = []
    """The names of default limits that cannot be enforced on this server."""
    expires_at: datetime | None = None
    leased_until: datetime | None = None
    """The sandbox counts as in use until then."""
    paused_by: PausedBy | None = None
    """`user`: the sandbox has to be resumed. `idle`, `room`: any use of it resumes it."""
    command_end: CommandEndInfo | None = None
    """Null while the command of its spec runs, or if it has none."""
    ended_at: datetime | None = None
    resources: ResourcesInUse | None = None
    """Only where they were asked for, and while it runs."""


class SandboxPage(BaseModel):
    items: list[SandboxInfo]
    next_page_id: str | None = None


class Success(BaseModel):
    success: bool = True


class SandboxSettings(BaseModel):
    """What a sandbox should be; as in a spec of the catalogue."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    image: Annotated[str, Field(min_length=1, max_length=512)] = "host"
    isolation: Literal["namespaces", "gvisor", "vm"] | None = None
    work_dir: Annotated[str, Field(max_length=4096)] = "/workspace"
    hostname: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9-]{0,62}$")] = "sandbox"
    env: Variables = {}
    limits: Limits = Limits()
    network: Annotated[NetworkPolicy, BeforeValidator(parse_policy)] = "none"
    """What it may reach. Only administrators open private ranges, which are those of the server's own network."""
    volumes: Annotated[list[Volume], Field(max_length=64)] = []
    """Directories of the server's machine: only administrators may share them."""
    undo: UndoRule | None = None
    """Keep the state before each command that the server runs."""
    setup: SetupCommands = ()
    """Command lines that run in order before the sandbox is given out. If one fails no sandbox is made."""
    setup_timeout_s: SetupTime = 600.0
    """How long all of them together may take."""

    @model_validator(mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        return before(lambda given: manus.settings(given, cls.model_fields), value)

    def spec(self) -> SandboxSpec:
        """Raises SpecError for what makes no sense."""
        values = {name: getattr(self, name) for name in SandboxSettings.model_fields if name != "volumes"}
        try:
            values["network"] = with_secrets(self.network)
        except ValueError as error:
            raise SpecError(str(error)) from None
        return SandboxSpec.of(**values, volumes=tuple(self.volumes))

    @classmethod
    def of(cls, spec: SandboxSpec) -> SandboxSettings:
        values = {name: getattr(spec, name) for name in cls.model_fields if name not in ("volumes", "network")}
        return cls(**values, network=without_secrets(spec.network), volumes=list(spec.volumes))


class SnapshotInfo(BaseModel):
    """A state under a name of its own: `image` of new sandboxes may be `snapshot:NAME`."""

    name: str
    owner_id: str
    created_at: float
    image: str
    """What the sandbox was made from, which has to be there too."""
    size_bytes: int
    source: str
    """The sandbox it was made of, or that it was imported."""
    memory: bool = False
    """Whether processes go on in sandboxes that are made from it, with the same isolation."""

    @classmethod
    def of(cls, snapshot: Snapshot, owner_id: str) -> SnapshotInfo:
        return cls(
            name=snapshot.name.rpartition("/")[2],
            owner_id=owner_id,
            created_at=snapshot.created_at,
            image=snapshot.image.rpartition("/")[2] if snapshot.image.startswith("snapshot:") else snapshot.image,
            size_bytes=snapshot.size_bytes,
            source=snapshot.source,
            memory=snapshot.memory,
        )


class ForkStart(BaseModel):
    """All of it may be left out: one sandbox, as this one is now."""

    model_config = ConfigDict(extra="forbid")
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    checkpoint: Annotated[str, Field(max_length=64)] | None = None
    memory: bool = False
    """Whether its processes go on in each of them; from a checkpoint that has memory they always do."""
    drop_connections: bool = False
    """With memory: connections to the outside cannot be saved, and are in the way unless they may be dropped."""
    names: Annotated[list[Name], Field(max_length=1000)] = []
    labels: Annotated[list[Labels], Field(max_length=1000)] = []
    """Names and labels are one for each, or none."""
    lifetime_s: Lifetime | None = None

    @model_validator(mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        return before(lambda given: renamed(given, cls.model_fields, _LIFE, of="a fork"), value)


class RegistryLogin(BaseModel):
    """The caller's login at the registry of the image. Used for this request only and never stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    username: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^:\x00-\x1f]+$")]
    password: Annotated[str, Field(max_length=16384, repr=False)]


class SandboxStart(BaseModel):
    """All of it may be left out. `settings` instead of `sandbox_spec_id` describes the sandbox on the spot."""

    model_config = ConfigDict(extra="forbid")
    sandbox_spec_id: Annotated[str, Field(max_length=128)] | None = None
    settings: SandboxSettings | None = None
    name: Name | None = None
    labels: Labels = {}
    env: Variables = {}
    lifetime_s: Lifetime | None = None
    idle_timeout_s: Lifetime | None = None
    """Seconds without use until the sandbox is idle; at most the server's setting, which is the default."""
    on_idle: OnIdle | None = None
    """What happens to the sandbox then. Default: the server's setting."""
    registry_login: RegistryLogin | None = None
    """For an image that is not public: the operator's logins are not used for users."""
    task_id: Name | None = None
    """The task that the sandbox is for. It is the label `task_id`, and stands for the id of the sandbox in requests."""
    exposed_ports: Annotated[list[ExposedPort], Field(max_length=64)] = []
    """Besides those of the spec, whose ports of the same name they replace. Each is a variable inside: `NAME=PORT`."""
    health: HealthCheck | None = None
    """Instead of that of the spec. With one the answer comes while the sandbox is STARTING."""
    callback: bool | None = None
    """Whether programs inside are told where to post messages, and with which key: `OH_WEBHOOKS_0_BASE_URL`,
    `OH_SESSION_API_KEYS_0`. Default: as the spec says."""

    @model_validator(mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        return before(lambda given: manus.start(given, cls.model_fields, SandboxSettings.model_fields), value)


class ImagePull(BaseModel):
    model_config = ConfigDict(extra="forbid")
    registry_login: RegistryLogin | None = None


class ImageProgressInfo(BaseModel):
    """How far the image of a spec is."""

    model_config = ConfigDict(from_attributes=True)
    stage: str
    """`wait`, `pull`, `build`, `extract` or `check`."""
    detail: str
    """Which layer, which package."""
    done_bytes: int
    total_bytes: int | None
    """Null when nobody knows how much is to come."""


class SandboxSpecInfo(BaseModel):
    id: str
    command: list[str] | None = None
    """Run in the background as soon as a sandbox of this spec is there."""
    created_at: datetime
    initial_env: dict[str, str] = {}
    working_dir: str = "/workspace"
    image: str = "host"
    isolation: str | None = None
    limits: Limits = Limits()
    exposed_ports: list[ExposedPort] = []
    health: HealthCheck | None = None
    callback: bool = False
    owner_id: str | None = None
    """Whose it is; null: everybody's."""
    is_default: bool = False
    image_status: Literal["ready", "pending", "pulling", "failed"] = "ready"
    image_detail: str = ""
    """Why it failed."""
    image_progress: ImageProgressInfo | None = None
    """While it is being fetched."""


class SandboxSpecInfoPage(BaseModel):
    items: list[SandboxSpecInfo]
    next_page_id: str | None = None


class SandboxSpecCreate(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: SpecId
    settings: SandboxSettings = SandboxSettings()
    command: Annotated[list[Text], Field(min_length=1, max_length=256)] | None = None
    exposed_ports: Annotated[list[ExposedPort], Field(max_length=64)] = []
    """Each is a variable inside: `NAME=PORT`."""
    health: HealthCheck | None = None
    callback: bool = False
    """Whether programs inside are told where to post messages, and with which key."""
    shared: bool = False
    """For everybody. Only administrators may share one."""
    registry_login: RegistryLogin | None = None
    """For an image that is not public, to fetch it now. It is not stored."""

    @model_validator(mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        return before(lambda given: renamed(given, cls.model_fields, of="a spec"), value)
