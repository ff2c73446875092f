"""Isolated Linux sandboxes for AI agents.

Most programs need only `Sandbox` or `AsyncSandbox`, and `SandboxManager` for many sandboxes; the other names are types
of their arguments and results. Each is imported when it is first used, so that a program waits only for what it uses.
"""

from importlib import import_module

EXPORTS = {
    "ALLOW": "atoll.openmanus",
    "AgentError": "atoll.errors",
    "AgentUnreachableError": "atoll.errors",
    "Answer": "atoll.compat.openmanus.policy",
    "AsyncCommand": "atoll.sandbox.command",
    "AsyncDockerizedTerminal": "atoll.openmanus",
    "AsyncForward": "atoll.sandbox.port_forward",
    "AsyncImage": "atoll.builds.image",
    "AsyncPortStream": "atoll.guest.port_streams",
    "AsyncSandbox": "atoll.sandbox.sandbox",
    "AsyncShell": "atoll.sandbox.shell",
    "AsyncTerminal": "atoll.sandbox.terminal",
    "AsyncVolumes": "atoll.sandbox.volumes",
    "AsyncWatch": "atoll.guest.file_watch",
    "BaseSandboxClient": "atoll.openmanus",
    "BuildError": "atoll.errors",
    "BuildEvent": "atoll.builds.request",
    "Capability": "atoll.model",
    "Ceilings": "atoll.resources",
    "Cause": "atoll.model",
    "Change": "atoll.model.checkpoint",
    "ChangeKind": "atoll.model.checkpoint",
    "Checkpoint": "atoll.model.checkpoint",
    "CheckpointNotFoundError": "atoll.errors",
    "Checkpointing": "atoll.engines.checkpointing",
    "Command": "atoll._sync",
    "CommandEnd": "atoll.manager",
    "CommandRefusedError": "atoll.errors",
    "ConflictError": "atoll.errors",
    "DockerSandbox": "atoll.openmanus",
    "DockerfileError": "atoll.errors",
    "EffectiveLimits": "atoll.model",
    "Engine": "atoll.engines.contract",
    "EngineDescription": "atoll.engines.contract",
    "EngineError": "atoll.errors",
    "EngineNotFoundError": "atoll.errors",
    "EngineUnavailableError": "atoll.errors",
    "Event": "atoll.manager",
    "ExecutionResult": "atoll.model",
    "Export": "atoll.sandbox.export",
    "FileEvent": "atoll.guest.files",
    "FileEventKind": "atoll.guest.files",
    "FileInfo": "atoll.guest.files",
    "FileOperator": "atoll.openmanus",
    "ForbiddenError": "atoll.errors",
    "Forward": "atoll._sync",
    "Handle": "atoll.model",
    "Image": "atoll._sync_image",
    "ImageBuildNotFoundError": "atoll.errors",
    "ImageConfig": "atoll.images",
    "ImageDefaults": "atoll.model",
    "ImageError": "atoll.errors",
    "ImageNotFoundError": "atoll.errors",
    "ImageUnreachableError": "atoll.errors",
    "Injection": "atoll.model.network_policy",
    "KeyNotFoundError": "atoll.errors",
    "LimitReachedError": "atoll.errors",
    "Limits": "atoll.model",
    "ListedSandbox": "atoll.model",
    "ListeningPort": "atoll.model",
    "LocalSandboxClient": "atoll.openmanus",
    "ManagedSandbox": "atoll.manager",
    "ManagerClosedError": "atoll.errors",
    "NamedVolumes": "atoll.engines.named_volumes",
    "NetworkRules": "atoll.model.network_policy",
    "NotAuthenticatedError": "atoll.errors",
    "Observation": "atoll.model",
    "Omitted": "atoll.model.checkpoint",
    "Operation": "atoll.manager",
    "OperationError": "atoll.errors",
    "Output": "atoll.sandbox.command",
    "PausedBy": "atoll.manager",
    "Policy": "atoll.openmanus",
    "PoolSettings": "atoll.manager",
    "PortStream": "atoll._sync",
    "ProtocolError": "atoll.errors",
    "RateLimitedError": "atoll.errors",
    "ReadyCheck": "atoll.model",
    "Record": "atoll.manager",
    "Recovered": "atoll.manager",
    "Refusal": "atoll.network.refusals",
    "Resources": "atoll.resources",
    "Retention": "atoll.manager",
    "Rule": "atoll.model.network_policy",
    "SANDBOX_CLIENT": "atoll.openmanus",
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
    "SandboxSpecNotFoundError": "atoll.errors",
    "SandboxTimeoutError": "atoll.errors",
    "SessionNotFoundError": "atoll.errors",
    "Settings": "atoll.settings",
    "SetupError": "atoll.errors",
    "Shell": "atoll._sync",
    "Shutdown": "atoll.manager",
    "SignatureError": "atoll.errors",
    "Snapshot": "atoll.model.checkpoint",
    "SnapshotNotFoundError": "atoll.errors",
    "SpecError": "atoll.errors",
    "StartCommand": "atoll.model",
    "StartError": "atoll.errors",
    "StartState": "atoll.sandbox.start_up",
    "State": "atoll.model",
    "StateError": "atoll.errors",
    "StateInUseError": "atoll.errors",
    "Stats": "atoll.model",
    "StoreError": "atoll.errors",
    "StoredImageNotFoundError": "atoll.errors",
    "Terminal": "atoll._sync",
    "ToolError": "atoll.errors",
    "Undo": "atoll.model.checkpoint",
    "UndoRule": "atoll.model",
    "UnsupportedError": "atoll.errors",
    "UserNotFoundError": "atoll.errors",
    "Verdict": "atoll.openmanus",
    "Volume": "atoll.model",
    "VolumeInfo": "atoll.model.volume",
    "VolumeNotFoundError": "atoll.errors",
    "VolumeSizes": "atoll.resources",
    "Volumes": "atoll._sync",
    "Watch": "atoll._sync",
    "WebhookNotFoundError": "atoll.errors",
    "ask": "atoll.openmanus",
    "create_sandbox_client": "atoll.openmanus",
    "refuse": "atoll.openmanus",
}
"""The module of each public name. `make generate` writes `__init__.pyi` from it, which tells type checkers the same."""

RETIRED = {"FileWatch": "Watch", "Port": "PortStream"}
"""Earlier public names and those that have taken their place. They go on working, with a warning."""

__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    """Import a public name, or a submodule such as `atoll.errors`, when it is first used (PEP 562)."""
    if name in EXPORTS:
        value = getattr(import_module(EXPORTS[name]), name)
        globals()[name] = value  # so that the next use finds it without this function
        return value
    if name in RETIRED:
        import warnings

        warnings.warn(f"atoll.{name} is called atoll.{RETIRED[name]} now", DeprecationWarning, stacklevel=2)
        return __getattr__(RETIRED[name])
    submodule = f"{__name__}.{name}"
    try:
        return import_module(submodule)
    except ModuleNotFoundError as error:
        if error.name != submodule:  # the submodule exists and lacks something
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
