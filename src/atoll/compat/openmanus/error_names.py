"""Errors in the types and words that programs written for OpenManus expect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from atoll.errors import OperationError, SandboxError, SandboxGoneError, SandboxResourceError, SandboxTimeoutError
from atoll.model import Cause

NOT_INITIALIZED = "Sandbox not initialized"
_RESOURCES = (Cause.OUT_OF_MEMORY, Cause.DISK_FULL, Cause.PIDS)


@contextmanager
def failing_to(do: str, *, tells_missing: bool = False) -> Iterator[None]:
    """Turn the errors of the block into "Failed to {do}: …".

    Invalid arguments, timeouts and errors that a limit of the sandbox has caused pass unchanged, and with
    `tells_missing` so does FileNotFoundError.
    """
    try:
        yield
    except SandboxGoneError as error:
        kind = SandboxResourceError if error.cause in _RESOURCES else OperationError
        raise kind(f"Failed to {do}: {error}", hint=error.hint) from error
    except (SandboxResourceError, SandboxTimeoutError, OperationError):
        raise
    except (SandboxError, OSError, UnicodeError) as error:
        if tells_missing and isinstance(error, FileNotFoundError):
            raise
        raise OperationError(f"Failed to {do}: {error}", hint=getattr(error, "hint", None)) from error
