"""The manager's record of one sandbox, as plain data that is written down before anything is done."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from atoll.engines import registry
from atoll.model import Cause, Handle, SandboxSpec, State
from atoll.model.spec import unnamed
from atoll.printable import printable

_MAX_REASON = 2_000
_NEWER = ("start", "ready", "sudo", "prewarm", "user")
"""Fields of a spec that earlier versions did not have, and that are None where they are not used."""
_MAX_SHOWN = 300


class Operation(enum.StrEnum):
    """What is being done to a sandbox. After a crash it says what to finish or to undo."""

    CREATE = "create"
    DELETE = "delete"
    PAUSE = "pause"
    RESUME = "resume"


class PausedBy(enum.StrEnum):
    """Who paused a sandbox. One that its user paused stays paused until the user resumes it."""

    USER = "user"
    IDLE = "idle"
    """The manager, because the sandbox was idle."""
    ROOM = "room"
    """The manager, because another sandbox needed its place."""


OnIdle = Literal["end", "pause", "disk"]
"""What happens to an idle sandbox."""


class CommandEnd(BaseModel):
    """How the command that a sandbox was made for ended."""

    model_config = ConfigDict(frozen=True)
    exit_code: int | None = None
    """The exit code as a shell reports it. None if the sandbox was started again without the command."""
    cause: Cause
    output: str = ""
    """The end of its output."""
    at: float

    @property
    def reason(self) -> str:
        """A description in one line, with the last of the command's output."""
        how = f"with exit code {self.exit_code}" if self.exit_code is not None else "when the sandbox was started anew"
        said = " ".join(printable(self.output, instead=" ").split())
        return f"the command of its spec ended {how}{f': {said[-_MAX_SHOWN:]}' if said else ''}"


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)

    id: str
    engine: Annotated[str, AfterValidator(registry.canonical)]
    spec: SandboxSpec
    """The spec that the engine got, with the labels that mark it as a sandbox of this manager."""
    state: State = State.MISSING
    act: Operation | None = None
    cause: Cause | None = None
    reason: str = ""
    name: str | None = None
    owner: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of every command, besides those of the spec."""
    pool: str | None = None
    """The pool that the sandbox waits in, or None if it is not a spare."""
    key: str | None = None
    """The idempotency key of the request that created the sandbox."""
    fingerprint: str = ""
    """Hash of that request. The same key with another request is a conflict."""
    created_at: float = 0.0
    ended_at: float | None = None
    timeout_s: float | None = None
    """Default timeout of commands."""
    lifetime_s: float | None = None
    expires_at: float | None = None
    expires_now: float | None = None
    """`expires_at` on the boot-time clock, valid only within the boot `boot_id`."""
    boot_id: str = ""
    idle_timeout_s: float | None = None
    """How long the sandbox may be unused. Here and in `on_idle`, None means the manager's default."""
    on_idle: OnIdle | None = None
    services: tuple[int, ...] = ()
    """Ports inside. While something listens on one of them, the sandbox is not ended for being idle."""
    leased_until: float | None = None
    """The sandbox counts as in use until then."""
    leased_now: float | None = None
    """`leased_until` on the boot-time clock."""
    paused_by: PausedBy | None = None
    paused_at: float | None = None
    watched: str | None = None
    """The command that the sandbox was made for. Its end is reported."""
    command_end: CommandEnd | None = None
    details: dict[str, str] = Field(default_factory=dict)
    """The details of the engine's handle."""

    def handle(self) -> Handle:
        return Handle(self.engine, self.id, self.spec, self.created_at, self.details)

    def remembered(self) -> Record:
        """Return the record to keep after the sandbox has ended, without what only a running one needs, which may be
        large."""
        none: dict[str, object] = {
            "env": {},
            "labels": {},
            "volumes": (),
            "network": "none",
            "setup": (),
            "start": (),
            "ready": None,
        }
        spec = self.spec.model_copy(update=none)
        return self.model_copy(update={"spec": spec, "env": {}, "details": {}, "reason": self.reason[:_MAX_REASON]})

    def matches(
        self,
        *,
        state: State | None = None,
        owner: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> bool:
        """Whether the record matches all given criteria."""
        return (
            (state is None or self.state is state)
            and (owner is None or self.owner == owner)
            and (name is None or self.name == name)
            and all(self.labels.get(label) == value for label, value in (labels or {}).items())
        )


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one sandbox."""

    at: float
    sandbox_id: str
    before: State
    after: State
    act: Operation | None = None
    cause: Cause | None = None
    reason: str = ""
    number: int = 0
    kind: str = "state"
    """`state` for a change of the sandbox's state, or a note about it. Other kinds are reports, see
    `SandboxManager.report`."""
    data: str = ""
    """The data of a report, as JSON."""


def spec_body(spec: SandboxSpec, unused: Iterable[str] = ()) -> str:
    """Return the JSON of a spec for a fingerprint, as earlier versions wrote it: without newer fields that are not
    used, and with the default work directory. `unused` are further fields to leave out."""
    left_out = {"account", *unused} | {newer for newer in _NEWER if getattr(spec, newer) is None}
    limits: dict[str, Any] = {"limits": {"shm_bytes"}} if spec.limits.shm_bytes is None else {}
    written = spec.model_copy(update={"work_dir": spec.directory})
    return written.model_dump_json(exclude={**dict.fromkeys(left_out, True), **limits, **unnamed(spec)})


def fingerprint(*parts: object) -> str:
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:32]
