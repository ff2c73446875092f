"""The description of a sandbox to be made: `SandboxSpec` and its parts."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from atoll.errors import SpecError
from atoll.model import manus_names
from atoll.model.named_specs import options_of
from atoll.model.network_policy import NetworkPolicy, parse_policy
from atoll.model.starting import ReadyCheck, StartCommands

OWNER_LABEL = "atoll.owner"
"""The label that says which user of a manager a sandbox belongs to, and with it whose named volumes it has."""
VOLUME_NAME_RULE = "use up to 63 letters, digits, '.', '_' and '-', beginning with a letter or digit"
_VOLUME_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_CACHE_NAME = re.compile(r"@[0-9a-f]{40}")
"""The caches of builds, which no user can name."""
_ENV_NAME = re.compile(r"[^=\0\s]+")
USER = re.compile(r"[^\s:\x00-\x1f\x7f]{1,128}(:[^\s:\x00-\x1f\x7f]{1,128})?")
DEFAULT_WORK_DIR = "/workspace"
_MAX_ENV_VALUE = 128 * 1024
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(value: object) -> int:
    """Return the bytes that `512m`, `1.5g` or `4096` stands for. Units are powers of 1024, as in Docker."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"a size is a number of bytes or text such as '512m', not {value!r}")
    match = _SIZE.match(str(value))
    if not match:
        raise ValueError(f"{value!r} is not a size: write a number of bytes, or '512m', '2g'")
    return int(float(match[1]) * _UNITS[match[2].lower()])


Size = Annotated[int, BeforeValidator(parse_size)]
MAX_BYTES = 1 << 60
"""More than any machine has. The kernel does not accept every larger number."""
SHM_BYTES = 64 << 20
"""The size of /dev/shm where a spec names none, which is that of Docker, too."""


class Limits(BaseModel):
    """Hard caps. None means that none was asked for: the engine's default holds. A cap that was asked for and cannot be
    enforced is refused; a default that cannot be enforced is left out and reported."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    memory_bytes: Annotated[Size, Field(ge=4 << 20, le=MAX_BYTES)] | None = None
    """Memory, in bytes or as text such as `512m`."""
    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    """CPUs; fractions are allowed."""
    pids: Annotated[int, Field(ge=2, le=4_194_304)] | None = None
    """Processes and threads."""
    disk_bytes: Annotated[Size, Field(ge=1 << 20, le=MAX_BYTES)] | None = None
    """Disk space, in bytes or as text such as `2g`."""
    inodes: Annotated[int, Field(ge=16)] | None = None
    """Files and directories."""
    open_files: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    """Open files of each process."""
    shm_bytes: Annotated[Size, Field(ge=1 << 16, le=MAX_BYTES)] | None = None
    """The size of `/dev/shm`, in bytes or as text such as `512m`. What is in it counts as memory of the sandbox."""
    lifetime_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds until the sandbox ends."""

    @model_validator(mode="after")
    def _shm_within_memory(self) -> Limits:
        if self.shm_bytes is not None and self.memory_bytes is not None and self.shm_bytes > self.memory_bytes:
            raise ValueError(
                f"shm is {self.shm_bytes:,} bytes and counts as memory, of which there are {self.memory_bytes:,}"
            )
        return self

    def over(self, defaults: Limits) -> Limits:
        """These limits, with `defaults` where none is set."""
        asked = {name: value for name in Limits.model_fields if (value := getattr(self, name)) is not None}
        return defaults.model_copy(update=asked)


class Volume(BaseModel):
    """A named volume, or a directory or file of the host, that the sandbox sees. Either `name` or `host` is given."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    host: str = ""
    """The path on the server's machine, for a directory or file of that machine."""
    name: str = ""
    """The name of a named volume, which is made if there is none."""
    path: str
    """The path inside the sandbox."""
    read_only: bool = False
    """Whether the sandbox may only read it."""

    @model_validator(mode="before")
    @classmethod
    def _written(cls, value: Any) -> Any:
        """Accept the form of a command line as well."""
        return cls.parse(value).model_dump() if isinstance(value, str) else value

    @classmethod
    def parse(cls, text: str) -> Volume:
        """Parse the form `NAME:PATH[:ro|rw]`, as on a command line. A source with a slash is a path of the host instead
        of a name. Raises SpecError."""
        parts = text.split(":")
        if len(parts) == 2:
            parts.append("rw")
        if len(parts) != 3 or parts[2] not in ("ro", "rw") or not all(parts):
            raise SpecError(
                f"{text!r} is not a volume",
                hint="Write NAME:PATH for a named volume or /HOST:PATH for a directory, perhaps with ':ro' behind it.",
            )
        if "/" not in parts[0] and not is_volume_name(parts[0]):
            raise SpecError(
                f"{parts[0][:80]!r} cannot be the name of a volume: {VOLUME_NAME_RULE}",
                hint="A directory of this machine has a slash, as in './data'.",
            )
        try:
            source = {"host": parts[0]} if "/" in parts[0] else {"name": parts[0]}
            return cls(**source, path=parts[1], read_only=parts[2] == "ro")
        except ValidationError as error:
            raise SpecError(f"{text!r} is not a volume: {_first(error)}") from error

    @classmethod
    def cache(cls, identifier: str, path: str, *, read_only: bool = False) -> Volume:
        """Return the volume of a build's cache of this id."""
        return cls(name="@" + hashlib.sha256(identifier.encode()).hexdigest()[:40], path=path, read_only=read_only)

    @property
    def source(self) -> str:
        """The name, or the path on the host."""
        return self.name or self.host

    @field_validator("host", "path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return absolute_path(value) if value else value

    @field_validator("name")
    @classmethod
    def _valid_name(cls, value: str) -> str:
        if value and not (_VOLUME_NAME.fullmatch(value) or _CACHE_NAME.fullmatch(value)):
            raise ValueError(f"{value[:80]!r} cannot be the name of a volume: {VOLUME_NAME_RULE}")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Volume:
        if bool(self.host) == bool(self.name) or not self.path:
            raise ValueError("a volume has a path inside, and either a name or a host directory")
        return self


def unnamed(spec: SandboxSpec) -> dict[str, Any]:
    """Return what a dump must leave out of a spec so that earlier versions, which had no named volumes, read it: the
    empty names, in the words of `model_dump(exclude=…)`."""
    found = {number: {"name"} for number, volume in enumerate(spec.volumes) if not volume.name}
    return {"volumes": found} if found else {}


def is_volume_name(name: str) -> bool:
    """Return whether users may give a volume this name."""
    return _VOLUME_NAME.fullmatch(name) is not None


def absolute_path(value: str) -> str:
    if "\0" in value or not value.startswith("/") or ".." in value.split("/"):
        raise ValueError(f"{value!r} must be an absolute path without '..'")
    return posixpath.normpath("/" + value.lstrip("/"))


def _commands(value: object) -> object:
    if isinstance(value, str | bytes) or not isinstance(value, list | tuple):
        raise ValueError(f"a list of command lines, such as ['pip install numpy'], not {str(value)[:80]!r}")
    for line in value:
        if not isinstance(line, str) or not line.strip() or "\0" in line:
            raise ValueError(f"{str(line)[:80]!r} is not a command line")
    return value


SetupCommands = Annotated[
    tuple[Annotated[str, Field(max_length=16_384)], ...], BeforeValidator(_commands), Field(max_length=64)
]
SetupTime = Annotated[float, Field(gt=0, le=3600)]


class UndoRule(BaseModel):
    """When a sandbox keeps the state before a command, and how many of these."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    keep: Annotated[int, Field(ge=1, le=500)] = 20
    """How many checkpoints to keep."""
    only: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(default=(), max_length=64)
    """Shell patterns, such as `*rm *`, of the command lines that are worth it. None: all."""


def _rule(value: object) -> object:
    """Return the rule that `true` and `false` stand for."""
    return (UndoRule() if value else None) if isinstance(value, bool) else value


UndoSetting = Annotated[UndoRule | None, BeforeValidator(_rule)]


class SandboxSpec(BaseModel):
    """The description of a sandbox to be made. It is immutable. `SandboxSpec.of(...)` raises `SpecError` if invalid."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    image: str = "host"
    isolation: Literal["namespaces", "gvisor", "vm"] | None = None
    work_dir: str | None = None
    """The directory where commands and relative paths start. None: that of the image, or `/workspace`."""
    user: str | None = None
    """The user inside, `NAME` or `NAME:GROUP` or their numbers, that commands run as if they name none. None: that of
    the image, or root."""
    hostname: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9-]{0,62}$")] = "sandbox"
    env: dict[str, str] = Field(default_factory=dict)
    limits: Limits = Field(default_factory=Limits)
    volumes: tuple[Volume, ...] = ()
    network: Annotated[NetworkPolicy, BeforeValidator(parse_policy)] = "none"
    labels: dict[str, str] = Field(default_factory=dict)
    undo: UndoSetting = None
    """Whether to make checkpoints before commands, so that `undo` can go back to them."""
    setup: SetupCommands = ()
    """Command lines that are run in order before anybody gets the sandbox."""
    setup_timeout_s: SetupTime = 600.0
    """The timeout of all setup commands together."""
    start: StartCommands | None = None
    """Commands that run from the creation on, and that the agent starts again when they end. None: those of the
    image."""
    ready: ReadyCheck | None = None
    """What has to hold before anybody gets the sandbox. None: what the image says, if `start` is None too."""
    sudo: bool | None = None
    """Whether the account `user` inside may become root by `sudo`. None: what the image says, and otherwise it may not.
    """
    prewarm: Literal["memory"] | None = None
    """Whether to keep the memory of the first sandbox of this spec once it is ready, so that the next ones start with
    everything running. Needs `isolation="gvisor"`."""
    account: Annotated[str, Field(pattern=r"^[a-z0-9]{0,32}$")] = ""
    """Sandboxes of one account share its part of the machine. A manager gives each owner an account; an engine only
    compares accounts."""

    @model_validator(mode="after")
    def _prewarm_without_volumes(self) -> SandboxSpec:
        if self.prewarm is not None and self.volumes:
            raise ValueError("'prewarm' cannot be combined with volumes: what is in them may change after it was saved")
        return self

    @property
    def directory(self) -> str:
        """The work directory. Engines resolve `work_dir` when they make a sandbox."""
        return self.work_dir or DEFAULT_WORK_DIR

    @property
    def has_writable_volume(self) -> bool:
        """Whether the sandbox may write to files of the host. In a named volume no file can do harm there."""
        return any(volume.host and not volume.read_only for volume in self.volumes)

    @property
    def named_volumes(self) -> tuple[Volume, ...]:
        return tuple(volume for volume in self.volumes if volume.name)

    @property
    def owner(self) -> str:
        """The user of a manager that the sandbox belongs to. Empty: the user of this machine."""
        return self.labels.get(OWNER_LABEL, "")

    def settled(self, made: SandboxSpec) -> SandboxSpec:
        """Return this spec with what the engine decided when it made the sandbox: the image if it has a default of its
        own, the work directory and the user."""
        found = {"image": made.image, "work_dir": made.work_dir, "user": made.user}
        return (
            self
            if all(getattr(self, name) == value for name, value in found.items())
            else self.model_copy(update=found)
        )

    @classmethod
    def described(cls, values: object) -> SandboxSpec:
        """Create a spec from a mapping with the names of a spec or of the Manus example. Raises SpecError."""
        if not isinstance(values, Mapping):
            raise SpecError(
                f"{str(values)[:80]!r} does not describe a sandbox",
                hint="Give a SandboxSpec, or an object such as {'image': 'host', 'memory': '1g'}.",
            )
        if not all(isinstance(name, str) for name in values):
            raise SpecError("the names in the description of a sandbox must be strings")
        return cls.of(**values)

    @classmethod
    def named(cls, name: str) -> SandboxSpec:
        """Return a spec that comes with Atoll, such as `manus`. Raises SpecError if there is none of that name."""
        return cls.of(**options_of(name))

    @classmethod
    def of(cls, **values: Any) -> SandboxSpec:
        try:
            return cls(**manus_names.settings(values, cls.model_fields))
        except ValidationError as error:
            raise SpecError(f"not a valid sandbox: {_first(error)}") from error

    @field_validator("work_dir")
    @classmethod
    def _work_dir(cls, value: str | None) -> str | None:
        if value is None:
            return None
        path = absolute_path(value)
        if path.split("/")[1] in ("proc", "sys", "dev"):
            raise ValueError(f"{value!r} cannot be the work directory")
        return path

    @field_validator("user")
    @classmethod
    def _user(cls, value: str | None) -> str | None:
        if value is not None and not USER.fullmatch(value):
            raise ValueError(f"{value[:80]!r} is not a user: write a name, a number, or USER:GROUP")
        return value

    @field_validator("env")
    @classmethod
    def _env(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _ENV_NAME.fullmatch(name) or "\0" in text or len(text) > _MAX_ENV_VALUE:
                raise ValueError(f"environment variable {name[:80]!r} has an invalid name or value")
        return value


def _first(error: ValidationError) -> str:
    detail = error.errors()[0]
    where = ".".join(str(part) for part in detail["loc"])
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
