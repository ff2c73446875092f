"""What the runtime API takes and gives: the names are those that OpenHands's remote back end sends and reads."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from atoll.service.models import Name, SandboxStatus, Text, Variables

PORTS = {"AGENT_SERVER": 60000, "VSCODE": 60001, "WORKER_1": 12000, "WORKER_2": 12001}
"""What listens in every runtime, or will."""
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
    """The sandbox of one session. The same request again is the same runtime."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    session_id: Name
    """Chosen by the caller, among whose sessions it is unique."""
    image: Annotated[str, Field(min_length=1, max_length=512)]
    """Or the id of a spec of the catalogue, which then says what the sandbox is."""
    command: Annotated[list[Text], Field(min_length=1, max_length=256)] | Text | None = None
    working_dir: Annotated[str, Field(max_length=4096)] = "/workspace"
    environment: Variables = {}
    resource_factor: Annotated[float, Field(gt=0, le=64)] = 1
    """So many times the default memory, CPUs and processes."""
    run_as_user: _UserId | None = None
    run_as_group: _UserId | None = None
    fs_group: _UserId | None = None
    """Whose the work directory is, besides the user's."""
    runtime_class: Annotated[str, Field(max_length=64)] | None = None
    """`gvisor` or `kata`; default: the server's own isolation."""
    enable_gpu: bool = False
    """Refused: no engine can share a GPU between sandboxes."""

    @field_validator("runtime_class")
    @classmethod
    def _class(cls, value: str | None) -> str | None:
        if value is not None and value not in _ISOLATION:
            raise ValueError(f"there is no runtime class {value[:64]!r} here: leave it out, or use gvisor or kata")
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
        """`UID:GID` of the command. None: as the engine has it."""
        if self.run_as_user is None:
            return None
        group = self.run_as_group if self.run_as_group is not None else self.fs_group
        return f"{self.run_as_user}:{self.run_as_user if group is None else group}"


class RuntimeChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")
    runtime_id: Annotated[str, Field(max_length=128)]


class RuntimeInfo(BaseModel):
    runtime_id: str
    """The id of the sandbox. Before it has one, and after it could not be made, one that can only be stopped."""
    session_id: str
    status: RuntimeStatus
    pod_status: PodStatus
    """The same in the words of a cluster, which older releases of OpenHands read."""
    reason: str = ""
    url: str | None = None
    """Where its agent server answers. Only while it runs."""
    work_hosts: dict[str, int] = {}
    """Where its web applications answer, and on which ports they listen inside."""
    session_api_key: str | None = None
    """What its agent server takes as `X-Session-API-Key`. It is good for nothing else."""
    image: str
    working_dir: str
    created_at: datetime | None = None


class RuntimeList(BaseModel):
    runtimes: list[RuntimeInfo]
