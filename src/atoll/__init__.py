"""Isolated Linux sandboxes for AI agents.

Most programs need only `Sandbox` or `AsyncSandbox`, and `SandboxManager` for many sandboxes; the other names are types
of their arguments and results. The manager and the classes of OpenManus's sandbox (`DockerSandbox` and so on) are
imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from atoll._sync import Command, PortStream, Sandbox, Shell, Terminal, Watch
from atoll.errors import (
    AgentError,
    AgentUnreachableError,
    CheckpointNotFoundError,
    ConflictError,
    EngineError,
    EngineNotFoundError,
    EngineUnavailableError,
    ImageError,
    ImageNotFoundError,
    LimitReachedError,
    ManagerClosedError,
    ProtocolError,
    SandboxError,
    SandboxGoneError,
    SandboxNotFoundError,
    SandboxPausedError,
    SandboxResourceError,
    SandboxTimeoutError,
    SetupError,
    SpecError,
    StateError,
    StateInUseError,
    UnsupportedError,
)
from atoll.guest.files import FileEvent, FileEventKind, FileInfo
from atoll.guest.socket_tables import ListeningPort
from atoll.model import (
    Cause,
    ExecutionResult,
    Limits,
    Observation,
    SandboxDetails,
    SandboxSpec,
    State,
    Stats,
    Volume,
)
from atoll.model.checkpoint import Change, ChangeKind, Checkpoint, Snapshot, Undo
from atoll.sandbox.command import AsyncCommand, Output
from atoll.sandbox.export import Export
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.sandbox.shell import AsyncShell
from atoll.sandbox.terminal import AsyncTerminal

if TYPE_CHECKING:
    from atoll.compat.openmanus import (
        ALLOW,
        SANDBOX_CLIENT,
        AsyncDockerizedTerminal,
        BaseSandboxClient,
        CommandRefusedError,
        DockerSandbox,
        FileOperator,
        LocalSandboxClient,
        OperationError,
        Policy,
        SandboxFileOperations,
        SandboxFileOperator,
        SandboxSettings,
        ToolError,
        Verdict,
        ask,
        create_sandbox_client,
        refuse,
    )
    from atoll.manager import ManagedSandbox, PoolSettings, SandboxManager

__all__ = [
    "ALLOW",
    "SANDBOX_CLIENT",
    "AgentError",
    "AgentUnreachableError",
    "AsyncCommand",
    "AsyncDockerizedTerminal",
    "AsyncSandbox",
    "AsyncShell",
    "AsyncTerminal",
    "BaseSandboxClient",
    "Cause",
    "Change",
    "ChangeKind",
    "Checkpoint",
    "CheckpointNotFoundError",
    "Command",
    "CommandRefusedError",
    "ConflictError",
    "DockerSandbox",
    "EngineError",
    "EngineNotFoundError",
    "EngineUnavailableError",
    "ExecutionResult",
    "Export",
    "FileEvent",
    "FileEventKind",
    "FileInfo",
    "FileOperator",
    "ImageError",
    "ImageNotFoundError",
    "LimitReachedError",
    "Limits",
    "ListeningPort",
    "LocalSandboxClient",
    "ManagedSandbox",
    "ManagerClosedError",
    "Observation",
    "OperationError",
    "Output",
    "Policy",
    "PoolSettings",
    "PortStream",
    "ProtocolError",
    "Sandbox",
    "SandboxDetails",
    "SandboxError",
    "SandboxFileOperations",
    "SandboxFileOperator",
    "SandboxGoneError",
    "SandboxManager",
    "SandboxNotFoundError",
    "SandboxPausedError",
    "SandboxResourceError",
    "SandboxSettings",
    "SandboxSpec",
    "SandboxTimeoutError",
    "SetupError",
    "Shell",
    "Snapshot",
    "SpecError",
    "State",
    "StateError",
    "StateInUseError",
    "Stats",
    "Terminal",
    "ToolError",
    "Undo",
    "UnsupportedError",
    "Verdict",
    "Volume",
    "Watch",
    "ask",
    "create_sandbox_client",
    "refuse",
]

_LATER = frozenset(__all__) - frozenset(globals())
_OF_THE_MANAGER = frozenset({"ManagedSandbox", "PoolSettings", "SandboxManager"})


if not TYPE_CHECKING:  # hidden from type checkers, which know all names and would otherwise accept misspelt ones

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "atoll.manager" if name in _OF_THE_MANAGER else "atoll.openmanus"
        return getattr(importlib.import_module(module), name)
