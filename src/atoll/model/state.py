"""What an engine reports: its powers, the state of a sandbox and why it ended, what is in use, how far an image is."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Capability(enum.StrEnum):
    """A power or an enforceable control that an engine declares."""

    MEMORY = "memory"
    CPUS = "cpus"
    PIDS = "pids"
    DISK = "disk"
    INODES = "inodes"
    OPEN_FILES = "open_files"
    VOLUMES = "volumes"
    IMAGES = "images"
    PAUSE = "pause"
    CHECKPOINTS = "checkpoints"
    """States of its files can be kept, gone back to, and started from."""
    NETWORK = "network"
    """A network policy other than `none` is enforced."""
    USERS = "users"
    """Commands can run as any user of the image, and root inside may act as root."""
    ISOLATION = "isolation"
    """There is a wall at all. Only the engine that says it has none lacks this."""


class State(enum.StrEnum):
    """The state of a sandbox, as a manager records it."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    STOPPED = "STOPPED"
    ERROR = "ERROR"
    MISSING = "MISSING"


class Cause(enum.StrEnum):
    """Why a command or a sandbox ended."""

    EXIT = "exit"
    SIGNAL = "signal"
    TIMEOUT = "timeout"
    KILLED = "killed"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    PIDS = "pids"
    POLICY = "policy"
    USER = "user"
    HOST = "host"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Observation:
    """What an engine sees of a sandbox right now."""

    state: State
    cause: Cause | None = None
    reason: str = ""
    wakes: bool = False
    """The sandbox is paused, and any use of it resumes it."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether an engine can work on this machine, and what to do if it cannot."""

    name: str
    available: bool
    reasons: tuple[str, ...] = ()
    """Why the engine is not available. For an available engine: what its users should know."""
    hints: tuple[str, ...] = ()
    """What to do about the reasons, as commands where possible."""
    version: str | None = None
    """The version of the program that makes the sandboxes."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Resources in use. None: this engine cannot know."""

    memory_bytes: int | None = None
    cpu_s: float | None = None
    pids: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ImageProgress:
    """What is being done to get an image ready. `total_bytes` is None when nobody knows how much is to come."""

    stage: str
    """One of `wait`, `pull`, `build`, `extract`, `check`."""
    detail: str = ""
    """Which layer, which package."""
    done_bytes: int = 0
    total_bytes: int | None = None


class SandboxStatus(enum.StrEnum):
    """The state of a sandbox in the words of OpenHands."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    ERROR = "ERROR"
    """The sandbox has ended by itself, or its engine cannot report on it."""
    MISSING = "MISSING"
    """The sandbox is gone."""


STATUS_OF = {
    State.STARTING: SandboxStatus.STARTING,
    State.RUNNING: SandboxStatus.RUNNING,
    State.PAUSED: SandboxStatus.PAUSED,
    State.STOPPED: SandboxStatus.ERROR,
    State.ERROR: SandboxStatus.ERROR,
    State.MISSING: SandboxStatus.MISSING,
}
"""The word of OpenHands for each state of ours."""


# MISSING ──► STARTING ──► RUNNING ◄──► PAUSED
#                             └────┬───────┘
#                                  ▼
#                               STOPPED
#
# every state ──► MISSING             the sandbox was deleted, or nothing is left of it
# every state but MISSING ──► ERROR   the engine cannot report on the sandbox, or cannot do what it should
# ERROR ──► what the engine sees      once the engine can report again
#
# A sandbox that has STOPPED stays so until it is deleted: its cause and its files are still there.
LEGAL: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.MISSING: frozenset({State.STARTING}),
        State.STARTING: frozenset({State.RUNNING, State.ERROR, State.MISSING}),
        State.RUNNING: frozenset({State.PAUSED, State.STOPPED, State.ERROR, State.MISSING}),
        State.PAUSED: frozenset({State.RUNNING, State.STOPPED, State.ERROR, State.MISSING}),
        State.STOPPED: frozenset({State.ERROR, State.MISSING}),
        State.ERROR: frozenset({State.RUNNING, State.PAUSED, State.STOPPED, State.MISSING}),
    }
)
"""The states that may follow each state. Code that changes a state calls `next_state` first."""
ALIVE = frozenset({State.STARTING, State.RUNNING, State.PAUSED})
"""The states in which a sandbox has processes, or will have them soon."""


class IllegalTransitionError(ValueError):
    """The program asked for an illegal change of state: a bug, never a mistake of a user."""


def is_legal(before: State, after: State) -> bool:
    return after in LEGAL[before]


def next_state(before: State, after: State) -> State:
    """Return `after`. Raises IllegalTransitionError if it may not follow `before`."""
    if not is_legal(before, after):
        raise IllegalTransitionError(f"a sandbox cannot go from {before} to {after}")
    return after
