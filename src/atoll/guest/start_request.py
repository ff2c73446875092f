"""The request that starts a process, validated before it is sent to the agent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.guest.frames import (
    MAX_ID,
    MAX_PATH,
    MAX_PAYLOAD,
    MAX_STRING,
    RestartPolicy,
    StartFlag,
    Tag,
    encode_fields,
    encode_text,
)


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A process to start: either `argv` or a `shell` command line. Raises ValueError if no system could run it."""

    id: bytes
    """An id chosen by the caller. A second start with the same id attaches to the first process."""
    argv: Sequence[str | bytes] | None = None
    shell: str | bytes | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    stdin: bool = False
    pty: tuple[int, int] | None = None
    """Rows and columns of a terminal; None for pipes."""
    merge: bool = False
    """Whether standard error goes to standard output."""
    status: bool = False
    """Whether file descriptor 9 of the process becomes channel 3."""
    detach: bool = False
    clean: bool = False
    """Whether the process gets none of the variables of the agent itself, only `env` and those of its user."""
    forget: bool = False
    """Whether the agent forgets the process once its end has been delivered."""
    existing: bool = False
    """Whether FileNotFoundError is raised if there is no file at the path of the program."""
    deadline_s: float | None = None
    grace_s: float | None = None
    rlimits: Sequence[tuple[int, int, int]] = ()
    """Triples of resource, soft limit and hard limit."""
    keep_bytes: int | None = None
    restart: RestartPolicy = RestartPolicy.NEVER
    """Whether the agent starts the process again when it ends."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.id) <= MAX_ID:
            raise ValueError(f"a process id has 1 to {MAX_ID} bytes, not {len(self.id)}")
        if (self.argv is None) == (self.shell is None):
            raise ValueError("give either argv or shell")
        if self.argv is not None and isinstance(self.argv, str | bytes):
            raise ValueError("argv must be a list of arguments, not one string")
        if self.argv is not None and (not self.argv or not self.argv[0]):
            raise ValueError("the command is empty")
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise ValueError(f"environment variable {name[:80]!r} has an invalid name or value")
        for text in (*(self.argv or ()), self.shell, self.cwd, self.user):
            _check_text(text)
        if self.cwd is not None and len(encode_text(self.cwd)) > MAX_PATH:
            raise ValueError("the work directory is too long")
        for seconds in (self.deadline_s, self.grace_s):
            if seconds is not None and not seconds >= 0:
                raise ValueError(f"{seconds!r} is not a number of seconds")

    def encode(self, *, started: bool = False, stdin: bool = False) -> bytes:
        """Encode as the fields of START. `started` requests the STARTED event; `stdin` adds an input in any case."""
        fields: list[tuple[Tag, int | bytes | str]] = [(Tag.ID, self.id)]
        fields += [(Tag.ARG, arg) for arg in self.argv or ()]
        if self.shell is not None:
            fields.append((Tag.SHELL, self.shell))
        fields += [(Tag.ENV, f"{name}={value}") for name, value in self.env.items()]
        if self.cwd is not None:
            fields.append((Tag.CWD, self.cwd))
        if self.user is not None:
            fields.append((Tag.USER, self.user))
        fields.append((Tag.FLAGS, self._flags(started, stdin)))
        fields += [(tag, ms) for tag, ms in self._times() if ms is not None]
        fields += [(Tag.RLIMIT, b"".join(n.to_bytes(8, "little") for n in limit)) for limit in self.rlimits]
        if self.pty is not None:
            fields += [(Tag.ROWS, self.pty[0]), (Tag.COLS, self.pty[1])]
        if self.keep_bytes is not None:
            fields.append((Tag.KEEP, self.keep_bytes))
        if self.restart is not RestartPolicy.NEVER:
            fields.append((Tag.RESTART, int(self.restart)))
        payload = encode_fields(fields)
        if len(payload) > MAX_PAYLOAD - 2:
            raise ValueError(f"the command and its environment are too long: {len(payload)} bytes")
        return payload

    def _flags(self, started: bool, stdin: bool) -> int:
        flags = StartFlag(0)
        if self.stdin or stdin:
            flags |= StartFlag.STDIN
        if self.pty is not None:
            flags |= StartFlag.PTY
        if self.merge:
            flags |= StartFlag.MERGE
        if self.status:
            flags |= StartFlag.STATUS
        if self.detach:
            flags |= StartFlag.DETACH
        if self.clean:
            flags |= StartFlag.CLEAN
        if self.forget:
            flags |= StartFlag.FORGET
        if self.existing:
            flags |= StartFlag.EXISTING
        if started:
            flags |= StartFlag.STARTED
        return int(flags)

    def _times(self) -> tuple[tuple[Tag, int | None], ...]:
        return (Tag.DEADLINE_MS, _milliseconds(self.deadline_s)), (Tag.GRACE_MS, _milliseconds(self.grace_s))


def _milliseconds(seconds: float | None) -> int | None:
    """Convert to milliseconds, at least 1: a deadline of zero must end the command, but 0 means none to the agent."""
    if seconds is None or math.isinf(seconds):
        return None
    return max(1, math.ceil(seconds * 1000))


def _check_text(text: str | bytes | None) -> None:
    if text is None:
        return
    raw = encode_text(text)
    if 0 in raw:
        raise ValueError("a command cannot contain a zero byte")
    if len(raw) > MAX_STRING:
        raise ValueError(f"an argument is too long: {len(raw)} bytes, at most {MAX_STRING} are possible")
