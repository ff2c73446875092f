"""The values that every layer shares: what a sandbox should be, what a command did, what an engine saw.

Pure: nothing here touches the machine.
"""

from __future__ import annotations

import enum
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from atoll import manus
from atoll.errors import SpecError
from atoll.network.policy import NetworkPolicy, parse_policy

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_ENV_NAME = re.compile(r"[^=\0\s]+")
_MAX_ENV_VALUE = 128 * 1024


def parse_size(value: object) -> int:
    """`512m`, `1.5g`, `4096` → bytes. Units are powers of 1024, as in Docker."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"a size is a number of bytes or text such as '512m', not {value!r}")
    match = _SIZE.match(str(value))
    if not match:
        raise ValueError(f"{value!r} is not a size: write a number of bytes, or '512m', '2g'")
    return int(float(match[1]) * _UNITS[match[2].lower()])


Size = Annotated[int, BeforeValidator(parse_size)]


class Cause(enum.StrEnum):
    """Why a command or a sandbox ended."""

    EXIT = "exit"
    SIGNAL = "signal"
    TIMEOUT = "timeout"
    KILLED = "killed"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    PIDS = "pids"
    POLICY = "policy"
    USER = "user"
    HOST = "host"
    LOST = "lost"


class Volume(BaseModel):
    """A directory or file of the host that the sandbox sees."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    host: str
    path: str
    read_only: bool = False

    @classmethod
    def parse(cls, text: str) -> Volume:
        """`HOST:PATH[:ro|rw]`, as on a command line."""
        parts = text.split(":")
        if len(parts) == 2:
            parts.append("rw")
        if len(parts) != 3 or parts[2] not in ("ro", "rw") or not all(parts):
            raise SpecError(f"{text!r} is not a volume", hint="Write HOST:PATH or HOST:PATH:ro.")
        try:
            return cls(host=parts[0], path=parts[1], read_only=parts[2] == "ro")
        except ValidationError as error:
            raise SpecError(f"{text!r} is not a volume: {_first(error)}") from error

    @field_validator("host", "path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return absolute_path(value)


def absolute_path(value: str) -> str:
    if "\0" in value or not value.startswith("/") or ".." in value.split("/"):
        raise ValueError(f"{value!r} must be an absolute path without '..'")
    return posixpath.normpath("/" + value.lstrip("/"))


class Limits(BaseModel):
    """Hard caps. None means that none was asked for: the engine's default holds. A cap that was asked for and cannot be
    enforced is refused; a default that cannot be enforced is left out and reported."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    memory_bytes: Annotated[Size, Field(ge=4 << 20)] | None = None
    cpus: Annotated[float, Field(gt=0, le=4096)] | None = None
    pids: Annotated[int, Field(ge=2, le=4_194_304)] | None = None
    disk_bytes: Annotated[Size, Field(ge=1 << 20)] | None = None
    inodes: Annotated[int, Field(ge=16)] | None = None
    open_files: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    lifetime_s: Annotated[float, Field(gt=0)] | None = None

    def over(self, defaults: Limits) -> Limits:
        """These limits, with `defaults` where none is set."""
        asked = {name: value for name in Limits.model_fields if (value := getattr(self, name)) is not None}
        return defaults.model_copy(update=asked)


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
    only: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(default=(), max_length=64)
    """Shell patterns, such as `*rm *`, of the command lines that are worth it. None: all."""


class SandboxSpec(BaseModel):
    """What a sandbox should be. Immutable; `SandboxSpec.of(...)` turns bad input into a `SpecError`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    image: str = "host"
    isolation: Literal["namespaces", "gvisor", "vm"] | None = None
    work_dir: str = "/workspace"
    hostname: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9-]{0,62}$")] = "sandbox"
    env: dict[str, str] = Field(default_factory=dict)
    limits: Limits = Field(default_factory=Limits)
    volumes: tuple[Volume, ...] = ()
    network: Annotated[NetworkPolicy, BeforeValidator(parse_policy)] = "none"
    labels: dict[str, str] = Field(default_factory=dict)
    undo: UndoRule | None = None
    """Keep the state before each command, so that `undo` can go back."""
    setup: SetupCommands = ()
    """Command lines that are run in order before the sandbox is given out."""
    setup_timeout_s: SetupTime = 600.0
    """How long all of them together may take."""
    account: Annotated[str, Field(pattern=r"^[a-z0-9]{0,32}$")] = ""
    """Sandboxes of one account share its part of the machine. A manager gives each owner an account; an engine only
    compares accounts."""

    @property
    def has_writable_volume(self) -> bool:
        return any(not volume.read_only for volume in self.volumes)

    @classmethod
    def described(cls, values: object) -> SandboxSpec:
        """From an object with the names of a spec, or as the Manus example has it. Raises SpecError."""
        if not isinstance(values, Mapping):
            raise SpecError(
                f"{str(values)[:80]!r} does not describe a sandbox",
                hint="Give a SandboxSpec, or an object such as {'image': 'host', 'memory': '1g'}.",
            )
        if not all(isinstance(name, str) for name in values):
            raise SpecError("the names in the description of a sandbox are text")
        return cls.of(**values)

    @classmethod
    def of(cls, **values: Any) -> SandboxSpec:
        try:
            return cls(**manus.settings(values, cls.model_fields))
        except ValidationError as error:
            raise SpecError(f"not a valid sandbox: {_first(error)}") from error

    @field_validator("work_dir")
    @classmethod
    def _work_dir(cls, value: str) -> str:
        path = absolute_path(value)
        if path == "/" or path.split("/")[1] in ("proc", "sys", "dev"):
            raise ValueError(f"{value!r} cannot be the work directory")
        return path

    @field_validator("env")
    @classmethod
    def _env(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _ENV_NAME.fullmatch(name) or "\0" in text or len(text) > _MAX_ENV_VALUE:
                raise ValueError(f"environment variable {name[:80]!r} has a bad name or value")
        return value


def _first(error: ValidationError) -> str:
    detail = error.errors()[0]
    where = ".".join(str(part) for part in detail["loc"])
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """What one command did. A failing command is a result, not an exception."""

    stdout: str
    stderr: str
    exit_code: int
    """As a shell reports it: 128 + n for signal n, 124 for a timeout."""
    duration_s: float
    cause: Cause
    truncated: bool = False
    """Whether more was written than was kept; the texts then say how much is missing."""
    stdout_bytes: bytes = field(default=b"", repr=False)
    stderr_bytes: bytes = field(default=b"", repr=False)
    cpu_s: float = 0.0
    max_rss_bytes: int = 0

    @property
    def success(self) -> bool:
        return self.exit_code == 0 and self.cause is Cause.EXIT

    @property
    def exitCode(self) -> int:  # noqa: N802
        """The same as `exit_code`, as the Manus example spells it."""
        return self.exit_code

    @property
    def error(self) -> str | None:
        """What went wrong, in one line, with the last line of stderr. None if the command succeeded."""
        return None if self.success else failure(self.cause, self.exit_code, self.stderr_bytes)

    @classmethod
    def captured(cls, stdout_bytes: bytes, stderr_bytes: bytes, **rest: Any) -> ExecutionResult:
        """A result made from the bytes that were written. `stdout` and `stderr` are decoded when first read:
        decoding many megabytes takes long, and whoever only passes the bytes on never needs it."""
        made = object.__new__(cls)
        values = {"truncated": False, "cpu_s": 0.0, "max_rss_bytes": 0, **rest}
        for name, value in {**values, "stdout_bytes": stdout_bytes, "stderr_bytes": stderr_bytes}.items():
            object.__setattr__(made, name, value)
        return made

    def without_output(self) -> ExecutionResult:
        rest = {name: getattr(self, name) for name in ("exit_code", "duration_s", "cause", "cpu_s", "max_rss_bytes")}
        return ExecutionResult.captured(b"", b"", **rest)

    def with_cause(self, cause: Cause) -> ExecutionResult:
        rest = {
            name: getattr(self, name) for name in ("exit_code", "duration_s", "truncated", "cpu_s", "max_rss_bytes")
        }
        return ExecutionResult.captured(self.stdout_bytes, self.stderr_bytes, cause=cause, **rest)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> str:
            if name not in ("stdout", "stderr"):
                raise AttributeError(name)
            text = getattr(self, f"{name}_bytes").decode(errors="replace")
            object.__setattr__(self, name, text)
            return text


_LIMITS_HIT = {
    Cause.OUT_OF_MEMORY: "memory",
    Cause.DISK_FULL: "disk",
    Cause.PIDS: "processes",
}
_LAST_LINE = 500


def failure(cause: Cause, exit_code: int, stderr: bytes) -> str:
    """How a command failed, in one line."""
    if cause is Cause.TIMEOUT:
        what = "the command was killed at its timeout"
    elif cause in _LIMITS_HIT:
        what = f"the command hit the sandbox's limit of {_LIMITS_HIT[cause]} (exit code {exit_code})"
    elif cause is Cause.EXIT:
        what = f"the command failed with exit code {exit_code}"
    elif cause is Cause.SIGNAL and exit_code > 128:
        what = f"the command was ended by signal {exit_code - 128}"
    else:
        what = f"the command did not end by itself: {cause} (exit code {exit_code})"
    lines = stderr[-8 * _LAST_LINE :].decode(errors="replace").strip().splitlines()
    last = "".join(letter for letter in lines[-1].strip() if letter.isprintable())[-_LAST_LINE:] if lines else ""
    return f"{what}: {last}" if last else what


class Capability(enum.StrEnum):
    """A power or an enforceable control that an engine declares."""

    MEMORY = "memory"
    CPUS = "cpus"
    PIDS = "pids"
    DISK = "disk"
    INODES = "inodes"
    OPEN_FILES = "open_files"
    VOLUMES = "volumes"
    IMAGES = "images"
    PAUSE = "pause"
    CHECKPOINTS = "checkpoints"
    """States of its files can be kept, gone back to, and started from."""
    NETWORK = "network"
    """A network policy other than `none` is enforced."""
    USERS = "users"
    """Commands can run as any user of the image, and root inside may act as root."""
    ISOLATION = "isolation"
    """There is a wall at all. Only the engine that says it has none lacks this."""


class State(enum.StrEnum):
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    STOPPED = "STOPPED"
    ERROR = "ERROR"
    MISSING = "MISSING"


@dataclass(frozen=True, slots=True)
class Handle:
    """Names one sandbox of one engine. Plain data: it can be written down and used by another process."""

    engine: str
    sandbox_id: str
    spec: SandboxSpec
    created_at: float
    details: dict[str, str] = field(default_factory=dict)

    def limits(self) -> EffectiveLimits:
        """The limits that hold, whether they were asked for or are the engine's defaults."""
        return effective_limits(self.spec, self.details)


DEFAULTS, LEFT_OUT = "default_limits", "limits_left_out"
"""Keys in the details of a handle: the default limits that the engine set, and the defaults that it cannot enforce."""


@dataclass(frozen=True, slots=True)
class EffectiveLimits:
    limits: Limits
    """The limits that are enforced."""
    left_out: tuple[str, ...] = ()
    """The names of defaults that cannot be enforced here. Only the size of the machine limits these."""


def effective_limits(spec: SandboxSpec, details: dict[str, str]) -> EffectiveLimits:
    limits = spec.limits.over(_limits(details[DEFAULTS])) if DEFAULTS in details else spec.limits
    return EffectiveLimits(limits, tuple(details.get(LEFT_OUT, "").split()))


@lru_cache(maxsize=64)  # an engine's defaults are the same for all of its sandboxes
def _limits(text: str) -> Limits:
    return Limits.model_validate_json(text)


@dataclass(frozen=True, slots=True)
class SandboxDetails:
    """Properties of a sandbox that do not change."""

    id: str
    engine: str
    image: str
    isolation: str | None
    """None: the engine's own."""
    limits: Limits
    """The limits that are enforced, whether they were asked for or are the engine's defaults."""
    limits_left_out: tuple[str, ...] = ()
    """The names of default limits that cannot be enforced here."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an engine sees of a sandbox right now."""

    state: State
    cause: Cause | None = None
    reason: str = ""
    wakes: bool = False
    """The sandbox is paused, and any use of it resumes it."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Resources in use. None: this engine cannot know."""

    memory_bytes: int | None = None
    cpu_s: float | None = None
    pids: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ImageProgress:
    """What is being done to get an image ready. `total_bytes` is None when nobody knows how much is to come."""

    stage: str
    """One of `wait`, `pull`, `build`, `extract`, `check`."""
    detail: str = ""
    """Which layer, which package."""
    done_bytes: int = 0
    total_bytes: int | None = None
