"""What the agent is asked to run, checked before it is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.guest.frames import (
    MAX_ID,
    MAX_PATH,
    MAX_PAYLOAD,
    MAX_STRING,
    StartFlag,
    Tag,
    encode_fields,
    encode_text,
)


@dataclass(frozen=True, slots=True)
class StartRequest:
    """One process: either `argv` or a `shell` command line. Raises ValueError for what no system could run."""

    id: bytes
    """Chosen by the caller; a second start with the same one attaches to the first."""
    argv: Sequence[str | bytes] | None = None
    shell: str | bytes | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    stdin: bool = False
    pty: tuple[int, int] | None = None
    """Rows and columns of a terminal."""
    merge: bool = False
    """Standard error into standard output."""
    status: bool = False
    """Descriptor 9 of the process becomes channel 3."""
    detach: bool = False
    forget: bool = False
    """Release it by itself once its end was delivered."""
    deadline_s: float | None = None
    grace_s: float | None = None
    rlimits: Sequence[tuple[int, int, int]] = ()
    """Resource, soft and hard limit."""
    keep_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.id) <= MAX_ID:
            raise ValueError(f"a process id has 1 to {MAX_ID} bytes, not {len(self.id)}")
        if (self.argv is None) == (self.shell is None):
            raise ValueError("give either argv or shell")
        if self.argv is not None and isinstance(self.argv, str | bytes):
            raise ValueError("argv is a list of arguments, not one text")
        if self.argv is not None and (not self.argv or not self.argv[0]):
            raise ValueError("the command is empty")
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise ValueError(f"environment variable {name[:80]!r} has a bad name or value")
        for text in (*(self.argv or ()), self.shell, self.cwd, self.user):
            _check_text(text)
        if self.cwd is not None and len(encode_text(self.cwd)) > MAX_PATH:
            raise ValueError("the work directory is too long")
        for seconds in (self.deadline_s, self.grace_s):
            if seconds is not None and not seconds >= 0:
                raise ValueError(f"{seconds!r} is not a number of seconds")

    def encode(self, *, started: bool = False, stdin: bool = False) -> bytes:
        """As the fields of START; `started` asks for the event, `stdin` for an input even if the request has none."""
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
        if self.forget:
            flags |= StartFlag.FORGET
        if started:
            flags |= StartFlag.STARTED
        return int(flags)

    def _times(self) -> tuple[tuple[Tag, int | None], ...]:
        return (Tag.DEADLINE_MS, _milliseconds(self.deadline_s)), (Tag.GRACE_MS, _milliseconds(self.grace_s))


def _milliseconds(seconds: float | None) -> int | None:
    """At least one: a deadline of zero must end the command, and the agent takes zero for none."""
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
