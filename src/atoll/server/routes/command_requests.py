"""The models of requests for commands and of their answers."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from atoll.model import Cause
from atoll.server.connections.large_results import Encoding
from atoll.service.models.request_model import RequestModel
from atoll.service.models.sandbox_request import Variables

Argument = Annotated[str, Field(max_length=131072)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
_TIMEOUT = {"timeout_s": "timeout"}
_MAX_OUTPUT_BYTES = 64 << 20


class CommandRequest(RequestModel):
    of = "a command"
    other_names = _TIMEOUT
    command: (
        Annotated[str, Field(min_length=1, max_length=131072)]
        | Annotated[list[Argument], Field(min_length=1, max_length=4096)]
    )
    """A command line for a shell, or a program and its arguments."""
    timeout: Seconds | None = None
    """Seconds after which the command and everything that it started are killed. Default: the server's setting; no
    limit for background commands."""
    env: Variables = Field(default_factory=dict)
    """Environment variables in addition to those of the sandbox."""
    cwd: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """The directory to run in. Default: the work directory."""
    user: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The user inside, by name or as `UID:GID`, to run as."""
    encoding: Encoding = "utf-8"
    """How output is represented. With `base64` every byte is preserved."""


class ExecRequest(CommandRequest):
    """The command to run."""

    stdin: str | None = None
    """The input of the command. Default: no input."""
    stdin_encoding: Encoding = "utf-8"
    """How `stdin` is represented."""
    max_output_bytes: Annotated[int, Field(ge=0, le=_MAX_OUTPUT_BYTES)] = 8 << 20
    """The most bytes of output to return for each of stdout and stderr. The middle of longer output is left out,
    visibly."""
    capture_output: bool = True
    """Whether to return output at all."""

    def input(self) -> bytes | None:
        """Return the bytes of `stdin`. Raise ValueError if it is not in its encoding."""
        if self.stdin is None:
            return None
        if self.stdin_encoding == "base64":
            try:
                return base64.b64decode(self.stdin, validate=True)
            except ValueError:
                raise ValueError("stdin is not valid base64") from None
        return self.stdin.encode(errors="replace")


class StartRequest(CommandRequest):
    """The command to start."""

    stdin: bool = False
    """Whether input will be sent to the command."""


class ExecResult(BaseModel):
    """The result of a command. A command that fails is a result, not an error."""

    success: bool
    """Whether the command ended by itself with exit code 0."""
    stdout: str
    """What the command wrote to standard output."""
    stderr: str
    """What the command wrote to standard error."""
    exit_code: int
    """The exit code as a shell reports it: 128 plus the signal number after a signal."""
    exitCode: int  # noqa: N815
    """The same as `exit_code`."""
    error: str | None
    """What went wrong, in one line. Null if the command succeeded."""
    cause: Cause
    """Why the command ended."""
    duration_s: float
    """How many seconds the command ran."""
    truncated: bool
    """Whether part of the output was left out."""
    cpu_s: float
    """CPU seconds that the command used."""
    max_rss_bytes: int
    """The most memory that one of its processes used."""


class CommandInfo(BaseModel):
    """A command that was started."""

    id: str
    """The id of the command."""
    pid: int
    """Its process id inside the sandbox."""


class CommandEntry(BaseModel):
    """A command in a list."""

    id: str
    """The id of the command."""
    state: Literal["running", "restarting", "ended", "missing"] | None = None
    """How a start command is. Null for other commands."""
    restarts: int | None = None
    """How often a start command was started again. Null for other commands."""
    exit_code: int | None = None
    """How a start command ended last. Null if it has not ended yet, and for other commands."""


class CommandPage(BaseModel):
    """One page of commands."""

    items: list[CommandEntry]
    """The commands of this page."""
    next_page_id: str | None = None
    """The `page_id` of the next page. Null on the last page."""


class ShellRequest(RequestModel):
    """The command line to run in a shell."""

    of = "a command"
    other_names = _TIMEOUT
    command: Annotated[str, Field(min_length=1, max_length=131072)]
    """The command line."""
    timeout: Seconds | None = None
    """Seconds after which the command is killed. Default: the server's setting."""
    shell: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "default"
    """The name of the shell. A new name starts a new shell."""


class KillRequest(RequestModel):
    """The signal to send."""

    of = "a signal"
    signal: Annotated[int, Field(ge=1, le=64)] = 9
    """The signal number. With 9, everything that the command started is killed too."""
