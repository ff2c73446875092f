"""The names of OpenManus's `app.sandbox`, for programs written for it: only their imports have to change.

Each is a thin layer over the rest of Atoll with the engine `docker`; nothing is implemented twice.
`docs/guides/openmanus.md` has a table of improvements.
"""

from atoll.compat.openmanus.docker_sandbox import Container, DockerSandbox
from atoll.compat.openmanus.dockerized_terminal import AsyncDockerizedTerminal
from atoll.compat.openmanus.file_operator import (
    EXCLUDED_DIRS,
    EXCLUDED_EXT,
    EXCLUDED_FILES,
    FileOperator,
    LocalFileOperator,
    PathLike,
    SandboxFileOperator,
    clean_path,
    should_exclude_file,
)
from atoll.compat.openmanus.openmanus_manager import SandboxManager
from atoll.compat.openmanus.policy import ALLOW, Policy, Verdict, ask, refuse
from atoll.compat.openmanus.sandbox_client import (
    SANDBOX_CLIENT,
    BaseSandboxClient,
    LocalSandboxClient,
    SandboxFileOperations,
    create_sandbox_client,
)
from atoll.compat.openmanus.sandbox_settings import Config, SandboxSettings, config
from atoll.errors import (
    CommandRefusedError,
    OperationError,
    SandboxError,
    SandboxResourceError,
    SandboxTimeoutError,
    ToolError,
)

__all__ = [
    "ALLOW",
    "EXCLUDED_DIRS",
    "EXCLUDED_EXT",
    "EXCLUDED_FILES",
    "SANDBOX_CLIENT",
    "AsyncDockerizedTerminal",
    "BaseSandboxClient",
    "CommandRefusedError",
    "Config",
    "Container",
    "DockerSandbox",
    "FileOperator",
    "LocalFileOperator",
    "LocalSandboxClient",
    "OperationError",
    "PathLike",
    "Policy",
    "SandboxError",
    "SandboxFileOperations",
    "SandboxFileOperator",
    "SandboxManager",
    "SandboxResourceError",
    "SandboxSettings",
    "SandboxTimeoutError",
    "ToolError",
    "Verdict",
    "ask",
    "clean_path",
    "config",
    "create_sandbox_client",
    "refuse",
    "should_exclude_file",
]
