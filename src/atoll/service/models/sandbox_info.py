"""What users are shown about a sandbox."""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict

from atoll.manager import CommandEnd, PausedBy
from atoll.model import Cause, ImageDefaults, Limits, State
from atoll.model.state import SandboxStatus
from atoll.service.models.exposed_port import ExposedUrl


class ResourcesInUse(BaseModel):
    """What a sandbox uses at the moment. Null where the engine cannot measure it."""

    model_config = ConfigDict(from_attributes=True)
    memory_bytes: int | None
    """Memory in use."""
    cpu_s: float | None
    """CPU seconds used since the sandbox started."""
    pids: int | None
    """Number of processes."""
    disk_bytes: int | None
    """Disk space in use."""


class CommandEndInfo(BaseModel):
    """How the command of a sandbox's spec ended. Its complete output is that of the command `spec-command`."""

    exit_code: int | None
    """The exit code as a shell reports it. Null if the sandbox was restarted without the command."""
    cause: Cause
    """Why the command ended."""
    output: str
    """The end of its output."""
    ended_at: datetime
    """When the command ended."""

    @classmethod
    def of(cls, end: CommandEnd) -> CommandEndInfo:
        moment = datetime.fromtimestamp(end.at, UTC)
        return cls(exit_code=end.exit_code, cause=end.cause, output=end.output, ended_at=moment)


class SandboxInfo(BaseModel):
    """A sandbox as its users see it."""

    id: str
    """The permanent id of the sandbox."""
    created_by_user_id: str | None
    """The owner of the sandbox."""
    sandbox_spec_id: str
    """The spec it was started from; empty if it was described by `settings`."""
    status: SandboxStatus
    """The state of the sandbox in the words of OpenHands."""
    session_api_key: str | None
    """The session key, for the header `X-Session-API-Key`. It is valid for this sandbox alone and only while it is
    RUNNING; null otherwise."""
    exposed_urls: list[ExposedUrl] | None = []
    """Where its exposed ports can be reached. Null unless it is RUNNING."""
    created_at: datetime
    """When the sandbox was created."""
    name: str | None = None
    """The name that its owner chose."""
    labels: dict[str, str] = {}
    """The labels that its owner set."""
    state: State
    """The state that the manager records. It tells STOPPED from ERROR, which `status` does not."""
    cause: Cause | None = None
    """Why the sandbox ended."""
    reason: str = ""
    """The cause in words."""
    engine: str
    """The engine that made the sandbox."""
    image: str
    """The image it was made from."""
    isolation: str | None = None
    """The isolation level that the sandbox has. Null: none, or it is not known yet."""
    work_dir: str
    """The directory where commands and relative paths start."""
    user: str | None = None
    """The user that commands run as if they name none. Null: root, or the only user inside."""
    image_defaults: ImageDefaults = ImageDefaults()
    """What the image says about sandboxes made from it."""
    limits: Limits
    """The limits that were requested."""
    effective_limits: Limits = Limits()
    """The limits that are enforced: those requested, and defaults for the others."""
    limits_left_out: list[str] = []
    """The names of default limits that this server cannot enforce."""
    expires_at: datetime | None = None
    """When its lifetime ends."""
    leased_until: datetime | None = None
    """Until when the sandbox counts as in use because of a keep-alive request."""
    paused_by: PausedBy | None = None
    """Who paused the sandbox. After `user` it has to be resumed; after `idle` or `room` any use resumes it."""
    command_end: CommandEndInfo | None = None
    """How the spec's command ended. Null while it runs, or if the spec has none."""
    ended_at: datetime | None = None
    """When the sandbox ended."""
    resources: ResourcesInUse | None = None
    """What the sandbox uses, if it was requested and the sandbox runs."""


class SandboxPage(BaseModel):
    """One page of sandboxes."""

    items: list[SandboxInfo]
    """The sandboxes of this page."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""
