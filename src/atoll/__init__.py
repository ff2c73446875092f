"""Isolated Linux sandboxes for AI agents.

`Sandbox` and `AsyncSandbox` are all that most programs need; the rest are the values they take and give.
"""

from atoll._sync import Command, FileWatch, Port, Sandbox, Shell, Terminal
from atoll.checkpoint import Change, ChangeKind, Checkpoint, Snapshot, Undo
from atoll.command import AsyncCommand, Output
from atoll.errors import (
    AgentError,
    AgentUnreachableError,
    CheckpointNotFoundError,
    EngineError,
    EngineNotFoundError,
    EngineUnavailableError,
    ImageError,
    ImageNotFoundError,
    ProtocolError,
    SandboxError,
    SandboxGoneError,
    SandboxNotFoundError,
    SandboxResourceError,
    SandboxTimeoutError,
    SpecError,
    UnsupportedError,
)
from atoll.guest.files import FileEvent, FileEventKind, FileInfo
from atoll.model import Cause, ExecutionResult, Limits, Observation, SandboxSpec, State, Stats, Volume
from atoll.sandbox import AsyncSandbox
from atoll.shell import AsyncShell
from atoll.terminal import AsyncTerminal

__all__ = [
    "AgentError",
    "AgentUnreachableError",
    "AsyncCommand",
    "AsyncSandbox",
    "AsyncShell",
    "AsyncTerminal",
    "Cause",
    "Change",
    "ChangeKind",
    "Checkpoint",
    "CheckpointNotFoundError",
    "Command",
    "EngineError",
    "EngineNotFoundError",
    "EngineUnavailableError",
    "ExecutionResult",
    "FileEvent",
    "FileEventKind",
    "FileInfo",
    "FileWatch",
    "ImageError",
    "ImageNotFoundError",
    "Limits",
    "Observation",
    "Output",
    "Port",
    "ProtocolError",
    "Sandbox",
    "SandboxError",
    "SandboxGoneError",
    "SandboxNotFoundError",
    "SandboxResourceError",
    "SandboxSpec",
    "SandboxTimeoutError",
    "Shell",
    "Snapshot",
    "SpecError",
    "State",
    "Stats",
    "Terminal",
    "Undo",
    "UnsupportedError",
    "Volume",
]
