"""Saved states as users see them: checkpoints of one sandbox, snapshots that outlive it, and changes between them."""

from __future__ import annotations

import enum
import fnmatch
import functools
from collections.abc import Callable
from dataclasses import dataclass

from atoll.model.spec import UndoRule


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved state of one sandbox, for rollbacks and forks. It is deleted with the sandbox."""

    id: str
    sandbox_id: str
    name: str
    created_at: float
    parent: str | None
    """The previous checkpoint in the sandbox's history. None if this one follows the state after its creation."""
    made_by: str
    """Why it was made: "user", or the command before which it was made for `undo`."""
    size_bytes: int
    """How much the sandbox had written by then. Checkpoints share identical data."""
    memory: bool = False
    """Whether it includes the memory of running processes."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A named saved state, which exists until it is deleted. Sandboxes start from it with `image="snapshot:NAME"`."""

    name: str
    created_at: float
    image: str
    """The image of the sandbox. It must exist to use the snapshot."""
    image_digest: str
    size_bytes: int
    source: str
    """The id of the sandbox it was made from, or the file it was imported from."""
    memory: bool = False


@dataclass(frozen=True, slots=True)
class Undo:
    """Before which commands a sandbox makes a checkpoint for `undo`, and how many of them it keeps."""

    keep: int = 20
    risky: Callable[[str], bool] | None = None
    """Returns whether to make a checkpoint before a command line. None means always."""

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
