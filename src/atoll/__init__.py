"""Isolated Linux sandboxes for AI agents.

`Sandbox` and `AsyncSandbox` are all that most programs need, and `SandboxManager` for many of them; the rest are the
values they take and give.
"""

from typing import TYPE_CHECKING

from atoll._sync import Command, FileWatch, Port, Sandbox, Shell, Terminal
from atoll.command import AsyncCommand, Output
from atoll.errors import (
    AgentError,
    AgentUnreachableError,
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
    SandboxResourceError,
    SandboxTimeoutError,
    SpecError,
    StateError,
    StateInUseError,
    UnsupportedError,
)
from atoll.guest.files import FileEvent, FileEventKind, FileInfo
from atoll.model import Cause, ExecutionResult, Limits, Observation, SandboxSpec, State, Stats, Volume
from atoll.sandbox import AsyncSandbox
from atoll.shell import AsyncShell
from atoll.terminal import AsyncTerminal

if TYPE_CHECKING:
    from atoll.manager import ManagedSandbox, PoolSettings, SandboxManager

__all__ = [
    "AgentError",
    "AgentUnreachableError",
    "AsyncCommand",
    "AsyncSandbox",
    "AsyncShell",
    "AsyncTerminal",
    "Cause",
    "Command",
    "ConflictError",
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
    "LimitReachedError",
    "Limits",
    "ManagedSandbox",
    "ManagerClosedError",
    "Observation",
    "Output",
    "PoolSettings",
    "Port",
    "ProtocolError",
    "Sandbox",
    "SandboxError",
    "SandboxGoneError",
    "SandboxManager",
    "SandboxNotFoundError",
    "SandboxResourceError",
    "SandboxSpec",
    "SandboxTimeoutError",
    "Shell",
    "SpecError",
    "State",
    "StateError",
    "StateInUseError",
    "Stats",
    "Terminal",
    "UnsupportedError",
    "Volume",
]
_OF_THE_MANAGER = frozenset({"ManagedSandbox", "PoolSettings", "SandboxManager"})


def __getattr__(name: str) -> object:
    """What belongs to the manager is imported when it is asked for: most programs have one sandbox."""
    if name in _OF_THE_MANAGER:
        from atoll import manager

        return getattr(manager, name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
