"""Isolated Linux sandboxes for AI agents.

Most programs need only `Sandbox` or `AsyncSandbox`, and `SandboxManager` for many sandboxes; the other names are types
of their arguments and results. Each is imported when it is first used, so that a program waits only for what it uses.
"""

from importlib import import_module

EXPORTS = {
    "ALLOW": "atoll.openmanus",
    "SANDBOX_CLIENT": "atoll.openmanus",
    "AgentError": "atoll.errors",
    "AgentUnreachableError": "atoll.errors",
    "AsyncCommand": "atoll.sandbox.command",
    "AsyncDockerizedTerminal": "atoll.openmanus",
    "AsyncSandbox": "atoll.sandbox.sandbox",
    "AsyncShell": "atoll.sandbox.shell",
    "AsyncTerminal": "atoll.sandbox.terminal",
    "BaseSandboxClient": "atoll.openmanus",
    "Cause": "atoll.model",
    "Change": "atoll.model.checkpoint",
    "ChangeKind": "atoll.model.checkpoint",
    "Checkpoint": "atoll.model.checkpoint",
    "CheckpointNotFoundError": "atoll.errors",
    "Command": "atoll._sync",
    "CommandRefusedError": "atoll.openmanus",
    "ConflictError": "atoll.errors",
    "DockerSandbox": "atoll.openmanus",
    "EngineError": "atoll.errors",
    "EngineNotFoundError": "atoll.errors",
    "EngineUnavailableError": "atoll.errors",
    "ExecutionResult": "atoll.model",
    "Export": "atoll.sandbox.export",
    "FileEvent": "atoll.guest.files",
    "FileEventKind": "atoll.guest.files",
    "FileInfo": "atoll.guest.files",
    "FileOperator": "atoll.openmanus",
    "FileWatch": "atoll._sync",
    "ImageError": "atoll.errors",
    "ImageNotFoundError": "atoll.errors",
    "LimitReachedError": "atoll.errors",
    "Limits": "atoll.model",
    "ListeningPort": "atoll.guest.socket_tables",
    "LocalSandboxClient": "atoll.openmanus",
    "ManagedSandbox": "atoll.manager",
    "ManagerClosedError": "atoll.errors",
    "Observation": "atoll.model",
    "OperationError": "atoll.openmanus",
    "Output": "atoll.sandbox.command",
    "Policy": "atoll.openmanus",
    "PoolSettings": "atoll.manager",
    "Port": "atoll._sync",
    "ProtocolError": "atoll.errors",
    "Sandbox": "atoll._sync",
    "SandboxDetails": "atoll.model",
    "SandboxError": "atoll.errors",
    "SandboxFileOperations": "atoll.openmanus",
    "SandboxFileOperator": "atoll.openmanus",
    "SandboxGoneError": "atoll.errors",
    "SandboxManager": "atoll.manager",
    "SandboxNotFoundError": "atoll.errors",
    "SandboxPausedError": "atoll.errors",
    "SandboxResourceError": "atoll.errors",
    "SandboxSettings": "atoll.openmanus",
    "SandboxSpec": "atoll.model",
    "SandboxTimeoutError": "atoll.errors",
    "SetupError": "atoll.errors",
    "Shell": "atoll._sync",
    "Snapshot": "atoll.model.checkpoint",
    "SpecError": "atoll.errors",
    "State": "atoll.model",
    "StateError": "atoll.errors",
    "StateInUseError": "atoll.errors",
    "Stats": "atoll.model",
    "Terminal": "atoll._sync",
    "ToolError": "atoll.openmanus",
    "Undo": "atoll.model.checkpoint",
    "UnsupportedError": "atoll.errors",
    "Verdict": "atoll.openmanus",
    "Volume": "atoll.model",
    "ask": "atoll.openmanus",
    "create_sandbox_client": "atoll.openmanus",
    "refuse": "atoll.openmanus",
}
"""The module of each public name. `make generate` writes `__init__.pyi` from it, which tells type checkers the same."""

__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    """Import a public name, or a submodule such as `atoll.errors`, when it is first used (PEP 562)."""
    if name in EXPORTS:
        value = getattr(import_module(EXPORTS[name]), name)
        globals()[name] = value  # so that the next use finds it without this function
        return value
    submodule = f"{__name__}.{name}"
    try:
        return import_module(submodule)
    except ModuleNotFoundError as error:
        if error.name != submodule:  # the submodule exists and lacks something
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
