"""What users see of saved states: checkpoints of one sandbox, snapshots that outlive it, and what changed."""

from __future__ import annotations

import enum
import fnmatch
import functools
from collections.abc import Callable
from dataclasses import dataclass

from atoll.model.spec import UndoRule


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state of one sandbox that it can go back to, or that others can start from. It goes with the sandbox."""

    id: str
    sandbox_id: str
    name: str
    created_at: float
    parent: str | None
    """The checkpoint that the sandbox came from when this one was made. None: from the state after its creation."""
    made_by: str
    """Why: "user", or the command before which it was made."""
    size_bytes: int
    """What the sandbox had written by then. Checkpoints share what is the same."""
    memory: bool = False
    """Whether running processes are in it too."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state under a name of its own, which is there until it is deleted: `image="snapshot:NAME"`."""

    name: str
    created_at: float
    image: str
    """What the sandbox was made from; it has to be there too."""
    image_digest: str
    size_bytes: int
    source: str
    """The sandbox it was made of, or the file it was imported from."""
    memory: bool = False


@dataclass(frozen=True, slots=True)
class Undo:
    """When a sandbox keeps the state before a command, and how many of these."""

    keep: int = 20
    risky: Callable[[str], bool] | None = None
    """Which command lines are worth it. None: all."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, not {self.keep}")

    @classmethod
    def of(cls, rule: UndoRule) -> Undo:
        return cls(rule.keep, functools.partial(_matches, rule.only) if rule.only else None)

    def covers(self, command: str) -> bool:
        return self.risky is None or self.risky(command)


def _matches(patterns: tuple[str, ...], line: str) -> bool:
    return any(fnmatch.fnmatchcase(line, pattern) for pattern in patterns)


class ChangeKind(enum.StrEnum):
    """How a file differs between two states."""

    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


class Omitted(enum.StrEnum):
    """Why a change has no text although text was asked for."""

    BINARY = "binary"
    SIZE = "size"
    """The file, or the sum of all differences, is too large to be shown."""
    TIME = "time"
    """The comparison took too long; this change is reported without its text."""


@dataclass(frozen=True, slots=True)
class Change:
    """One path that is different. Of a directory that was removed only the directory itself is told."""

    path: str
    kind: ChangeKind
    text: str | None = None
    """A unified diff, if it was asked for and both sides are text."""
    omitted: Omitted | None = None
    """Why there is no text, if text was asked for and the path is a file."""

    def __str__(self) -> str:
        return f"{self.kind.value[0].upper()} {self.path}"
