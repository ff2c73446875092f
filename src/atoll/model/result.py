"""The result of one command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.model.state import Cause
from atoll.printable import printable


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of one command. A command that fails is a result, not an exception."""

    stdout: str
    stderr: str
    exit_code: int
    """The exit code that a shell would report: 128 + n for signal n, 124 for a timeout."""
    duration_s: float
    cause: Cause
    truncated: bool = False
    """Whether some of the output was left out. The texts then say how much."""
    stdout_bytes: bytes = field(default=b"", repr=False)
    stderr_bytes: bytes = field(default=b"", repr=False)
    cpu_s: float = 0.0
    max_rss_bytes: int = 0

    @property
    def success(self) -> bool:
        return self.exit_code == 0 and self.cause is Cause.EXIT

    @property
    def exitCode(self) -> int:  # noqa: N802
        """The same as `exit_code`, in the spelling of the Manus example."""
        return self.exit_code

    @property
    def error(self) -> str | None:
        """A description of the failure on one line, with the last line of stderr. None if the command succeeded."""
        return None if self.success else failure(self.cause, self.exit_code, self.stderr_bytes)

    @classmethod
    def captured(cls, stdout_bytes: bytes, stderr_bytes: bytes, **rest: Any) -> ExecutionResult:
        """Create a result from the bytes that were written. `stdout` and `stderr` are decoded when they are first read,
        because decoding many megabytes is slow and callers that only pass on the bytes never need it."""
        made = object.__new__(cls)
        values = {"truncated": False, "cpu_s": 0.0, "max_rss_bytes": 0, **rest}
        for name, value in {**values, "stdout_bytes": stdout_bytes, "stderr_bytes": stderr_bytes}.items():
            object.__setattr__(made, name, value)
        return made

    def without_output(self) -> ExecutionResult:
        rest = {name: getattr(self, name) for name in ("exit_code", "duration_s", "cause", "cpu_s", "max_rss_bytes")}
        return ExecutionResult.captured(b"", b"", **rest)

    def with_cause(self, cause: Cause) -> ExecutionResult:
        rest = {
            name: getattr(self, name) for name in ("exit_code", "duration_s", "truncated", "cpu_s", "max_rss_bytes")
        }
        return ExecutionResult.captured(self.stdout_bytes, self.stderr_bytes, cause=cause, **rest)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> str:
            if name not in ("stdout", "stderr"):
                raise AttributeError(name)
            text = getattr(self, f"{name}_bytes").decode(errors="replace")
            object.__setattr__(self, name, text)
            return text


_LIMITS_HIT = {
    Cause.OUT_OF_MEMORY: "memory",
    Cause.DISK_FULL: "disk",
    Cause.PIDS: "processes",
}
_LAST_LINE = 500


def failure(cause: Cause, exit_code: int, stderr: bytes) -> str:
    """Describe the failure of a command on one line."""
    if cause is Cause.TIMEOUT:
        what = "the command was killed at its timeout"
    elif cause in _LIMITS_HIT:
        what = f"the command hit the sandbox's limit of {_LIMITS_HIT[cause]} (exit code {exit_code})"
    elif cause is Cause.EXIT:
        what = f"the command failed with exit code {exit_code}"
    elif cause is Cause.SIGNAL and exit_code > 128:
        what = f"the command was ended by signal {exit_code - 128}"
    else:
        what = f"the command did not end by itself: {cause} (exit code {exit_code})"
    lines = stderr[-8 * _LAST_LINE :].decode(errors="replace").strip().splitlines()
    last = printable(lines[-1], _LAST_LINE, instead="", end=True) if lines else ""
    return f"{what}: {last}" if last else what
