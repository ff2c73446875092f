"""The names of OpenHands's `app_server.sandbox`, for programs written for it: change the imports and they run.

Each service is a thin face of a manager, bound to one user; nothing is implemented twice. To use Atoll from OpenHands
itself, point its remote back end at a server's runtime API instead. `docs/guides/openhands.md` has a table of what is
better.
"""

from atoll.compat.openhands.config import SandboxConfig
from atoll.compat.openhands.from_environment import sandbox_service
from atoll.compat.openhands.openhands_services import DockerSandboxService, ProcessSandboxService, RemoteSandboxService
from atoll.compat.openhands.service import PresetSandboxSpecService, SandboxService, SandboxSpecService
from atoll.compat.openhands.values import (
    AGENT_SERVER,
    VSCODE,
    WORKER_1,
    WORKER_2,
    ExposedPort,
    ExposedUrl,
    SandboxInfo,
    SandboxPage,
    SandboxSpecInfo,
    SandboxSpecInfoPage,
    SandboxStatus,
    VolumeMount,
)

__all__ = [
    "AGENT_SERVER",
    "VSCODE",
    "WORKER_1",
    "WORKER_2",
    "DockerSandboxService",
    "ExposedPort",
    "ExposedUrl",
    "PresetSandboxSpecService",
    "ProcessSandboxService",
    "RemoteSandboxService",
    "SandboxConfig",
    "SandboxInfo",
    "SandboxPage",
    "SandboxService",
    "SandboxSpecInfo",
    "SandboxSpecInfoPage",
    "SandboxSpecService",
    "SandboxStatus",
    "VolumeMount",
    "sandbox_service",
]
