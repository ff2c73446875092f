"""Requests to create or fork a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from atoll.errors import SpecError
from atoll.manager import OnIdle
from atoll.model import (
    Limits,
    ReadyCheck,
    SandboxSpec,
    SetupCommands,
    SetupTime,
    StartCommands,
    UndoSetting,
    Volume,
    manus_names,
)
from atoll.model.network_policy import NetworkPolicy, parse_policy, with_secrets, without_secrets
from atoll.model.spelling import before
from atoll.service.models.exposed_port import ExposedPort, HealthCheck
from atoll.service.models.request_model import RequestModel
from atoll.service.models.sandbox_limits import LimitOptions

Variables = Annotated[dict[Annotated[str, Field(max_length=512)], Annotated[str, Field(max_length=131072)]], Field()]
MAX_SETTINGS = 512 << 10
"""Maximum number of characters in the settings of one sandbox or one spec, which are stored more than once."""
_MAX_LABELS = 16 << 10
_LIFE = {"lifetime_s": "lifetime", "timeout": "lifetime"}


def _small(labels: dict[str, str]) -> dict[str, str]:
    if sum(len(name) + len(value) for name, value in labels.items()) > _MAX_LABELS:
        raise ValueError(f"labels have at most {_MAX_LABELS:,} characters together")
    return labels


Labels = Annotated[dict[str, str], Field(max_length=64), AfterValidator(_small)]
Lifetime = Annotated[float, Field(gt=0, le=10 * 365 * 86400)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class SandboxSettings(BaseModel):
    """What a sandbox is made from: its image, limits, variables and network."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    image: Annotated[str, Field(min_length=1, max_length=512)] = "host"
    """An image reference such as `python:3.12`, `snapshot:NAME` for a snapshot, or `host` for the server's own `/usr`.
    """
    isolation: Literal["namespaces", "gvisor", "vm"] | None = None
    """The isolation level. Default: that of the server's engine."""
    work_dir: Annotated[str, Field(max_length=4096)] | None = None
    """The directory where commands and relative paths start. Default: that of the image, or `/workspace`."""
    user: Annotated[str, Field(max_length=257)] | None = None
    """The user inside that commands run as if they name none. Default: that of the image, or root."""
    hostname: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9-]{0,62}$")] = "sandbox"
    """The host name inside the sandbox."""
    env: Variables = Field(default_factory=dict)
    """Environment variables of all commands."""
    limits: Limits = Limits()
    """What the sandbox may use. Limits that are left out have the server's defaults."""
    network: Annotated[NetworkPolicy, BeforeValidator(parse_policy)] = "none"
    """What the sandbox may reach: `none`, `all` or rules. Only administrators may open private address ranges, because
    the server's own network is one."""
    volumes: Annotated[list[Volume], Field(max_length=64)] = Field(default_factory=list)
    """Named volumes of the caller, by `name`, and directories of the server's machine, by `host`. A named volume that
    does not exist is made. Only administrators may request directories."""
    undo: UndoSetting = None
    """Saves a checkpoint before each command that the server runs, so that commands can be undone."""
    setup: SetupCommands = ()
    """Command lines that run in order before the sandbox is handed out. If one fails, no sandbox is made."""
    setup_timeout_s: SetupTime = 600.0
    """How many seconds all setup commands may take together."""
    start: StartCommands | None = None
    """Commands that run from the creation on, and that are started again when they end. Default: those of the image."""
    ready: ReadyCheck | None = None
    """What has to hold before the sandbox is handed out: a command succeeds, a port listens or a path answers. If it
    does not hold in time, no sandbox is made."""
    sudo: bool | None = None
    """Whether the account `user` inside may become root by `sudo`. Default: what the image says."""
    prewarm: Literal["memory"] | None = None
    """Whether to keep the memory of the first sandbox of this spec once it is ready, so that the next ones start with
    everything running. Needs `isolation: gvisor`. Your sandboxes share it with those of no other user."""

    @model_validator(mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        return before(lambda given: manus_names.settings(given, cls.model_fields), value)

    @field_validator("image")
    @classmethod
    def _image(cls, value: str) -> str:
        if value.startswith("step:"):
            raise ValueError("a step of a build cannot be used as an image")
        return value

    def spec(self) -> SandboxSpec:
        """Convert the settings to a spec. Raise SpecError if they are invalid."""
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


class RegistryLogin(BaseModel):
    """The caller's login at the registry of an image. It is used for this request only and never stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    username: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^:\x00-\x1f]+$")]
    """The user name at the registry."""
    password: Annotated[str, Field(max_length=16384, repr=False)]
    """The password or access token."""


class SandboxOptions(LimitOptions):
    """What a sandbox is made from, under the names that these options have everywhere: in the SDK, on the command line
    and here. A validator moves them into `settings`, so they are None afterwards."""

    image: str | None = None
    """An image reference such as `python:3.12`, `snapshot:NAME` for a snapshot, or `host` for the server's own `/usr`.
    """
    isolation: Literal["namespaces", "gvisor", "vm"] | None = None
    """The isolation level. Default: that of the server's engine."""
    work_dir: str | None = None
    """The directory where commands and relative paths start. Default: that of the image, or `/workspace`."""
    user: str | None = None
    """The user inside that commands run as if they name none. Default: that of the image, or root."""
    hostname: str | None = None
    """The host name inside the sandbox."""
    inodes: int | None = None
    """Files and directories."""
    open_files: int | None = None
    """Open files of each process."""
    shm: str | int | None = None
    """The size of `/dev/shm`, in bytes or as text such as `1g`. What is in it counts as memory."""
    network: Any = None
    """What the sandbox may reach: `none`, `all` or rules."""
    volumes: list[Volume] | None = None
    """Named volumes of the caller, by `name`, and directories of the server's machine, by `host`. A named volume that
    does not exist is made. Only administrators may request directories."""
    undo: UndoSetting = None
    """Saves a checkpoint before each command that the server runs, so that commands can be undone."""
    setup: list[str] | None = None
    """Command lines that run in order before the sandbox is handed out. If one fails, no sandbox is made."""
    setup_timeout: float | None = None
    """How many seconds all setup commands may take together."""
    start: StartCommands | None = None
    """Commands that run from the creation on, and that are started again when they end."""
    ready: ReadyCheck | None = None
    """What has to hold before the sandbox is handed out: a port, a port and a path such as `8080/health`, or a command.
    """
    sudo: bool | None = None
    """Whether the account `user` inside may become root by `sudo`."""
    prewarm: Literal["memory"] | None = None
    """Whether to keep the memory of the first sandbox of this spec once it is ready, for the next ones."""
    ports: dict[str, int] | None = None
    """Ports to expose, by name: a short form of `exposed_ports`."""


class SandboxRequest(RequestModel, SandboxOptions):
    """The sandbox to start. Everything may be left out. The options that describe it stand either here or in
    `settings`, in place of a spec named by `sandbox_spec_id`."""

    sandbox_spec_id: Annotated[str, Field(max_length=128)] | None = None
    """The spec to start from. Default: the server's default spec."""
    settings: SandboxSettings | None = None
    """The settings to start from, in place of a spec."""
    name: Name | None = None
    """A name by which its owner can address the sandbox. Unique among the owner's sandboxes."""
    labels: Labels = Field(default_factory=dict)
    """Keys and values to find the sandbox by."""
    env: Variables = Field(default_factory=dict)
    """Environment variables in addition to those of the spec, or replacing them."""
    lifetime: Lifetime | None = None
    """Seconds after which the sandbox ends, used or not. The server may allow less."""
    idle_timeout: Lifetime | None = None
    """Seconds without use after which the sandbox is idle. At most the server's setting, which is the default."""
    on_idle: OnIdle | None = None
    """What happens to the sandbox when it is idle. Default: the server's setting."""
    registry_login: RegistryLogin | None = None
    """A login for an image that is not public. The operator's own logins are not used for users."""
    task_id: Name | None = None
    """The task that the sandbox is for. It is stored as the label `task_id` and can be used in place of the sandbox id.
    """
    exposed_ports: Annotated[list[ExposedPort], Field(max_length=64)] = Field(default_factory=list)
    """Ports to expose in addition to those of the spec; one of the same name replaces the spec's. Each sets a variable
    inside, `NAME=PORT`."""
    health: HealthCheck | None = None
    """A health check in place of the spec's. With a health check the request is answered while the sandbox is still
    STARTING."""
    callback: bool | None = None
    """Whether programs inside get the variables `OH_WEBHOOKS_0_BASE_URL` and `OH_SESSION_API_KEYS_0`, which say where
    to post messages and with which key. Default: as the spec says."""
    telemetry: bool = False
    """Whether programs inside get the variables of OpenTelemetry (`OTEL_EXPORTER_OTLP_ENDPOINT` and others) with which
    they send traces, metrics and logs through the server. Refused unless the server has an `otlp_endpoint`."""

    @classmethod
    def translated(cls, given: Mapping[Any, Any]) -> dict[str, Any]:
        fields = cls.model_fields.keys() - SandboxOptions.model_fields.keys()
        return manus_names.start(given, fields, SandboxSettings.model_fields)


class ForkRequest(RequestModel):
    """The forks to make. Everything may be left out: then there is one fork of the sandbox's present state."""

    of = "a fork"
    other_names = _LIFE
    count: Annotated[int, Field(ge=1, le=1000)] = 1
    """How many forks to make."""
    checkpoint: Annotated[str, Field(max_length=64)] | None = None
    """The id or name of the checkpoint to start from. Default: the present state."""
    memory: bool = False
    """Whether running processes continue in each fork. Forks of a checkpoint with saved memory always continue."""
    drop_connections: bool = False
    """Connections to the outside cannot be saved, so with `memory` an open one makes the request fail unless this is
    true."""
    names: Annotated[list[Name], Field(max_length=1000)] = Field(default_factory=list)
    """Either empty or one name for each fork."""
    labels: Annotated[list[Labels], Field(max_length=1000)] = Field(default_factory=list)
    """Either empty or one set of labels for each fork."""
    lifetime: Lifetime | None = None
    """Seconds after which each fork ends, used or not."""
