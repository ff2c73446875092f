"""Requests and answers of the runtime API, under the names that OpenHands's remote back end sends and reads."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from atoll.model.state import SandboxStatus
from atoll.service.models.catalogue import Text
from atoll.service.models.sandbox_request import Name, Variables

PORTS = {"AGENT_SERVER": 60000, "VSCODE": 60001, "WORKER_1": 12000, "WORKER_2": 12001}
"""The exposed ports of every OpenHands runtime."""
SERVICES = {"vscode": PORTS["VSCODE"], "work-1": PORTS["WORKER_1"], "work-2": PORTS["WORKER_2"]}
"""The names that OpenHands puts before the host, or behind the path, of a runtime's URL."""

RuntimeStatus = Literal["starting", "running", "paused", "stopped", "error"]
PodStatus = Literal["pending", "ready", "paused", "not found", "failed"]
STATUSES: dict[SandboxStatus, tuple[RuntimeStatus, PodStatus]] = {
    SandboxStatus.STARTING: ("starting", "pending"),
    SandboxStatus.RUNNING: ("running", "ready"),
    SandboxStatus.PAUSED: ("paused", "paused"),
    SandboxStatus.ERROR: ("error", "failed"),
    SandboxStatus.MISSING: ("stopped", "not found"),
}
_ISOLATION = {"gvisor": "gvisor", "kata": "vm"}
_UserId = Annotated[int, Field(ge=0, le=0xFFFF_FFFE)]


class RuntimeStart(BaseModel):
    """The OpenHands runtime to start: the sandbox of one session. The same request again finds the same runtime."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    session_id: Name
    """The id of the session, chosen by the caller and unique among the caller's sessions."""
    image: Annotated[str, Field(min_length=1, max_length=512)]
    """An image, or the id of a spec of the catalogue, which then describes the sandbox."""
    command: Annotated[list[Text], Field(min_length=1, max_length=256)] | Text | None = None
    """The command of the agent server: a command line, or a program and its arguments."""
    working_dir: Annotated[str, Field(max_length=4096)] = "/workspace"
    """The directory where the command starts."""
    environment: Variables = {}
    """Environment variables of the sandbox."""
    resource_factor: Annotated[float, Field(gt=0, le=64)] = 1
    """Multiplies the default limits of memory, CPUs and processes."""
    run_as_user: _UserId | None = None
    """The user id that the command runs as."""
    run_as_group: _UserId | None = None
    """The group id that the command runs as."""
    fs_group: _UserId | None = None
    """The group that owns the work directory. Used where `run_as_group` is not given."""
    runtime_class: Annotated[str, Field(max_length=64)] | None = None
    """`gvisor` or `kata`. Default: the server's own isolation level."""
    enable_gpu: bool = False
    """Must be false: no engine can share a GPU between sandboxes."""

    @field_validator("runtime_class")
    @classmethod
    def _class(cls, value: str | None) -> str | None:
        if value is not None and value not in _ISOLATION:
            raise ValueError(f"unknown runtime class {value[:64]!r}: leave it out, or use gvisor or kata")
        return value

    @field_validator("enable_gpu")
    @classmethod
    def _gpu(cls, value: bool) -> bool:
        if value:
            raise ValueError("no engine of this server can share a GPU between isolated sandboxes")
        return value

    @property
    def isolation(self) -> Any:
        return _ISOLATION.get(self.runtime_class or "")

    @property
    def user(self) -> str | None:
        """`UID:GID` of the command, or None for the engine's default."""
        if self.run_as_user is None:
            return None
        group = self.run_as_group if self.run_as_group is not None else self.fs_group
        return f"{self.run_as_user}:{self.run_as_user if group is None else group}"


class RuntimeChoice(BaseModel):
    """The OpenHands runtime that a request is about."""

    model_config = ConfigDict(extra="forbid")
    runtime_id: Annotated[str, Field(max_length=128)]
    """The id of the runtime."""


class RuntimeInfo(BaseModel):
    """An OpenHands runtime."""

    runtime_id: str
    """The id of the sandbox. While there is none, and after one could not be made, an id that can only be stopped."""
    session_id: str
    """The id of the session that the runtime belongs to."""
    status: RuntimeStatus
    """The state of the runtime."""
    pod_status: PodStatus
    """The same state in the words of Kubernetes, which older releases of OpenHands read."""
    reason: str = ""
    """Why the runtime is not running."""
    url: str | None = None
    """Where its agent server answers. Null unless it is running."""
    work_hosts: dict[str, int] = {}
    """Where its web applications answer, and which ports they use inside."""
    session_api_key: str | None = None
    """The key that its agent server accepts as `X-Session-API-Key`. It opens nothing on this server."""
    image: str
    """The image it was started from."""
    working_dir: str
    """The directory where its command started."""
    created_at: datetime | None = None
    """When its sandbox was created. Null before that."""


class RuntimeList(BaseModel):
    """The running and starting OpenHands runtimes of the caller."""

    runtimes: list[RuntimeInfo]
    """The runtimes, newest first."""
