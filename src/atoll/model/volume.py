"""A named volume as users see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """A named volume: a directory that outlives the sandboxes which mount it."""

    name: str
    created_at: float
    """When it was made, in seconds since 1970."""
    size_bytes: int | None
    """How much it can hold. None: as much as the engine's disk."""
    used_bytes: int | None
    """How much of that is used, with what it shares with copies. None: the engine does not count it."""
    read_only: bool = False
    """Whether it is a snapshot, which can only be mounted read-only."""
    source: str | None = None
    """The volume that it was copied from."""
    users: tuple[str, ...] = ()
    """The ids of the sandboxes that mount it."""
    owner: str = ""
    """The user of a manager that it belongs to. Empty: the user of this machine."""
