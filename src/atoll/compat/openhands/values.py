"""The values of OpenHands's sandbox service, with its names and defaults."""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from atoll.model import sandbox_status

AGENT_SERVER, VSCODE, WORKER_1, WORKER_2 = "AGENT_SERVER", "VSCODE", "WORKER_1", "WORKER_2"
SESSION_API_KEY_VARIABLE = "OH_SESSION_API_KEYS_0"
WEBHOOK_CALLBACK_VARIABLE = "OH_WEBHOOKS_0_BASE_URL"
ALLOW_CORS_ORIGINS_VARIABLE = "OH_ALLOW_CORS_ORIGINS_0"


def utc_now() -> datetime:
    return datetime.now(UTC)


class SandboxStatus(enum.Enum):
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    ERROR = "ERROR"
    MISSING = "MISSING"


STATUS = {state: SandboxStatus(shown.value) for state, shown in sandbox_status.STATUS.items()}


class ExposedUrl(BaseModel):
    name: str
    url: str
    port: int
    """The port inside the sandbox."""


class SandboxInfo(BaseModel):
    id: str
    created_by_user_id: str | None
    sandbox_spec_id: str
    status: SandboxStatus
    session_api_key: str | None
    """Present only while the sandbox is RUNNING."""
    exposed_urls: list[ExposedUrl] | None = Field(default_factory=list)
    created_at: datetime = Field(default_factory=utc_now)
    status_detail: str | None = None
    """The reason if the sandbox is in ERROR."""


class SandboxPage(BaseModel):
    items: list[SandboxInfo]
    next_page_id: str | None = None


class SandboxSpecInfo(BaseModel):
    """The source of sandboxes. Its id is the image."""

    id: str
    command: list[str] | None
    created_at: datetime = Field(default_factory=utc_now)
    initial_env: dict[str, str] = Field(default_factory=dict)
    working_dir: str = "/home/openhands/workspace"


class SandboxSpecInfoPage(BaseModel):
    items: list[SandboxSpecInfo]
    next_page_id: str | None = None


class VolumeMount(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    host_path: str
    container_path: str
    mode: Literal["rw", "ro"] = "rw"


class ExposedPort(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")
    description: str = ""
    container_port: int = Field(default=8000, ge=1, le=65535)


def default_ports() -> list[ExposedPort]:
    return [
        ExposedPort(name=AGENT_SERVER, description="its agent server", container_port=8000),
        ExposedPort(name=VSCODE, description="an editor", container_port=8001),
        ExposedPort(name=WORKER_1, description="a web application", container_port=8011),
        ExposedPort(name=WORKER_2, description="another web application", container_port=8012),
    ]
