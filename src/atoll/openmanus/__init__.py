"""The names of OpenManus's `app.sandbox`, for programs written for it: change the imports and they run.

Each is a thin face of what the rest of Atoll offers, with the engine `docker` chosen; nothing is implemented twice.
`docs/guides/openmanus.md` has a table of what is better.
"""

from atoll.errors import SandboxError, SandboxResourceError, SandboxTimeoutError
from atoll.openmanus.client import (
    SANDBOX_CLIENT,
    BaseSandboxClient,
    LocalSandboxClient,
    SandboxFileOperations,
    create_sandbox_client,
)
from atoll.openmanus.configuration import Config, config
from atoll.openmanus.excluding import (
    EXCLUDED_DIRS,
    EXCLUDED_EXT,
    EXCLUDED_FILES,
    clean_path,
    should_exclude_file,
)
from atoll.openmanus.failures import CommandRefusedError, OperationError, ToolError
from atoll.openmanus.file_operator import FileOperator, LocalFileOperator, PathLike, SandboxFileOperator
from atoll.openmanus.manager import SandboxManager
from atoll.openmanus.policy import ALLOW, Policy, Verdict, ask, refuse
from atoll.openmanus.sandbox import Container, DockerSandbox
from atoll.openmanus.settings import SandboxSettings
from atoll.openmanus.terminal import AsyncDockerizedTerminal

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
