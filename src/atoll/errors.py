"""All errors that Atoll raises, grouped by what the caller should do about them.

SandboxError                         anything that went wrong with a sandbox
├── SandboxTimeoutError              it took longer than the caller allowed (also a TimeoutError)
├── SetupError                       a setup command failed, so no sandbox was made; see `output`
├── StartError                       a start command failed, or the sandbox was not ready in time; see `output`
├── SandboxResourceError             a resource limit of the sandbox was the cause
├── SandboxNotFoundError             there is no such sandbox (also a KeyError)
├── CheckpointNotFoundError          there is no such checkpoint (also a KeyError)
├── SandboxGoneError                 the sandbox has ended; `cause` says why
├── SandboxPausedError               the sandbox is paused: resume it
├── SpecError                        the request is invalid: change it (also a ValueError)
│   ├── DockerfileError              the Dockerfile cannot be used: its reason begins with the file and the line
│   └── UnsupportedError             this engine cannot enforce the request: choose another
├── BuildError                       a step of a Dockerfile failed; see `step`, `place`, `exit_code`, `cause`, `output`
├── ImageError                       the image cannot be used
│   ├── ImageNotFoundError           there is no such image
│   │   ├── SnapshotNotFoundError    there is no such snapshot, or it is not yours
│   │   └── StoredImageNotFoundError  the server has no such image, or it is not yours
│   └── ImageUnreachableError        a server's user may not pull from there: see the settings of the server
├── EngineError                      the engine failed to do its work
│   ├── EngineNotFoundError          there is no engine of that name
│   └── EngineUnavailableError       the engine cannot work on this machine: install what is missing
├── AgentError                       the agent inside the sandbox failed
│   ├── AgentUnreachableError        it does not answer, or the connection to it was lost
│   └── ProtocolError                it violated the protocol: treat the sandbox as hostile
├── LimitReachedError                the maximum number of sandboxes exists: delete one, or wait (also a RuntimeError)
├── VolumeNotFoundError              there is no such volume, or it is not yours (also a KeyError)
├── ConflictError                    the name, id or idempotency key is already used for something else
├── ManagerClosedError               the manager was shut down (also a RuntimeError)
├── StateError                       the manager's journal cannot be read or written
│   └── StateInUseError              another manager uses the same state directory
├── NotAuthenticatedError            the server wants a credential, or a valid one
├── ForbiddenError                   the credential does not allow it
├── RateLimitedError                 too many requests: wait `retry_after_s`
├── ImageBuildNotFoundError          the server has no such build of an image, or it is not yours
├── SandboxSpecNotFoundError         there is no such spec in the server's catalogue, or it is not yours
├── UserNotFoundError                the server has no such user
├── KeyNotFoundError                 there is no such key, or it is not yours
├── SessionNotFoundError             there is no such OpenHands runtime or session, or it is not yours
├── WebhookNotFoundError             there is no such webhook, or it is not yours
├── SignatureError                   a message is not from who it says, is too old, or was already received
├── StoreError                       the server's database cannot be used
├── OperationError                   of `atoll.openmanus`: "Failed to …", see `__cause__` (also a RuntimeError)
│   └── CommandRefusedError          of `atoll.openmanus`: your own command policy does not allow this command
└── ToolError                        of `atoll.openmanus`: a file operator failed

A command that fails is a result, never an error. Missing files and the like raise the built-in `OSError`s.

A server answers with the `code` of an error, and its client raises the same class again.
"""

from __future__ import annotations


class SandboxError(Exception):
    """The base class of all errors. `code` never changes; `hint` says what to do. `str()` returns only the reason, on
    one line; a traceback shows the hint below it."""

    code = "sandbox_error"
    from_server = False
    """Whether a server reported it, rather than the program that raises it."""

    def __init__(self, reason: str, *, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self._hint: str | None = None
        self.hint = hint

    @property
    def hint(self) -> str | None:
        return self._hint

    @hint.setter
    def hint(self, hint: str | None) -> None:
        notes = [note for note in getattr(self, "__notes__", []) if note != self._hint]
        self._hint = hint
        self.__notes__ = [*notes, hint] if hint else notes

    def __str__(self) -> str:
        return self.reason


class SandboxTimeoutError(SandboxError, TimeoutError):
    code = "timeout"

    def __init__(self, reason: str, *, hint: str | None = None, output: str = "") -> None:
        super().__init__(reason, hint=hint)
        self.output = output
        """The output of the command before its timeout."""


class SetupError(SandboxError):
    code = "setup_failed"

    def __init__(self, reason: str, *, hint: str | None = None, output: str = "") -> None:
        super().__init__(reason, hint=hint)
        self.output = output
        """The end of the command's output."""


class BuildError(SandboxError):
    """A step of a build failed. What the error says is the reason; these are its parts."""

    code = "build_failed"

    def __init__(
        self,
        reason: str,
        *,
        hint: str | None = None,
        step: int = 0,
        place: str = "",
        instruction: str = "",
        exit_code: int | None = None,
        cause: str = "",
        output: str = "",
        sandbox_id: str = "",
    ) -> None:
        super().__init__(reason, hint=hint)
        self.step = step
        """The number of the step, from 1 on; 0: it concerns no step."""
        self.place = place
        """FILE:LINE of the instruction."""
        self.instruction = instruction
        self.exit_code = exit_code
        self.cause = cause
        """Why the command ended, such as `exit`, `timeout` or `out_of_memory`; empty if no command failed."""
        self.output = output
        """The last lines that the step wrote."""
        self.sandbox_id = sandbox_id
        """The sandbox of the failed step, if the request was to keep it."""


class StartError(SandboxError):
    code = "start_failed"

    def __init__(self, reason: str, *, hint: str | None = None, output: str = "") -> None:
        super().__init__(reason, hint=hint)
        self.output = output
        """The end of the output of the start commands."""


class SandboxResourceError(SandboxError):
    code = "resource_limit"


class SandboxNotFoundError(SandboxError, KeyError):
    code = "sandbox_not_found"
    __str__ = SandboxError.__str__


class CheckpointNotFoundError(SandboxError, KeyError):
    code = "checkpoint_not_found"
    __str__ = SandboxError.__str__


class SandboxGoneError(SandboxError):
    code = "sandbox_gone"

    def __init__(self, reason: str, *, cause: str = "unknown", hint: str | None = None) -> None:
        super().__init__(reason, hint=hint)
        self.cause = cause


class SandboxPausedError(SandboxError):
    code = "sandbox_paused"

    @classmethod
    def of(cls, sandbox_id: str) -> SandboxPausedError:
        return cls(f"sandbox {sandbox_id} is paused", hint="Resume it first.")


class SpecError(SandboxError, ValueError):
    code = "invalid_spec"


class DockerfileError(SpecError):
    code = "invalid_dockerfile"


class UnsupportedError(SpecError):
    code = "unsupported"


class ImageError(SandboxError):
    code = "image_unusable"


class ImageNotFoundError(ImageError):
    code = "image_not_found"


class SnapshotNotFoundError(ImageNotFoundError):
    code = "snapshot_not_found"


class StoredImageNotFoundError(ImageNotFoundError):
    code = "stored_image_not_found"


class ImageUnreachableError(ImageError):
    code = "image_unreachable"


class EngineError(SandboxError):
    code = "engine_failed"


class EngineNotFoundError(EngineError):
    code = "engine_not_found"


class EngineUnavailableError(EngineError):
    code = "engine_unavailable"


class AgentError(SandboxError):
    code = "agent_failed"


class AgentUnreachableError(AgentError):
    code = "agent_unreachable"


class ProtocolError(AgentError):
    code = "protocol_violation"


class LimitReachedError(SandboxError, RuntimeError):
    code = "limit_reached"


class VolumeNotFoundError(SandboxError, KeyError):
    code = "volume_not_found"
    __str__ = SandboxError.__str__


class ConflictError(SandboxError):
    code = "conflict"


class ManagerClosedError(SandboxError, RuntimeError):
    code = "manager_closed"


class StateError(SandboxError):
    code = "state_unusable"


class StateInUseError(StateError):
    code = "state_in_use"


class NotAuthenticatedError(SandboxError):
    code = "not_authenticated"


class ForbiddenError(SandboxError):
    code = "forbidden"


class RateLimitedError(SandboxError):
    code = "rate_limited"

    def __init__(self, reason: str, *, retry_after_s: float = 1.0, hint: str | None = None) -> None:
        super().__init__(reason, hint=hint)
        self.retry_after_s = retry_after_s


class SandboxSpecNotFoundError(SandboxError):
    code = "sandbox_spec_not_found"


class ImageBuildNotFoundError(SandboxError):
    code = "image_build_not_found"


class UserNotFoundError(SandboxError):
    code = "user_not_found"


class KeyNotFoundError(SandboxError):
    code = "key_not_found"


class SessionNotFoundError(SandboxError):
    code = "session_not_found"


class WebhookNotFoundError(SandboxError):
    code = "webhook_not_found"


class SignatureError(SandboxError):
    code = "bad_signature"


class StoreError(SandboxError):
    code = "store_unavailable"


class OperationError(SandboxError, RuntimeError):
    code = "operation_failed"


class CommandRefusedError(OperationError):
    code = "command_refused"


class ToolError(SandboxError):
    code = "tool_failed"

    @classmethod
    def because(cls, what: str, error: Exception) -> ToolError:
        return cls(f"{what}: {error}", hint=getattr(error, "hint", None))

    @property
    def message(self) -> str:
        return self.reason
