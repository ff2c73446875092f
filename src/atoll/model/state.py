"""What an engine reports: whether it works here, its capabilities, the state of a sandbox and the cause of its end, the
resources in use, and the progress of an image. The table of legal changes of state is here too."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Capability(enum.StrEnum):
    """A feature or a limit that an engine declares and therefore enforces."""

    MEMORY = "memory"
    CPUS = "cpus"
    PIDS = "pids"
    DISK = "disk"
    INODES = "inodes"
    OPEN_FILES = "open_files"
    SHM = "shm"
    """The size of `/dev/shm` can be chosen."""
    VOLUMES = "volumes"
    NAMED_VOLUMES = "named_volumes"
    """Directories of a user that outlive sandboxes can be mounted by name."""
    IMAGES = "images"
    PAUSE = "pause"
    CHECKPOINTS = "checkpoints"
    """The states of a sandbox's files can be saved and restored, and new sandboxes can start from them."""
    SAVED_MEMORY = "saved_memory"
    """Checkpoints can include the memory of running processes, and a sandbox can be paused to disk."""
    NETWORK = "network"
    """Network policies other than `none` can be enforced."""
    USERS = "users"
    """Commands can run as any user of the image, and root inside has the rights of root there."""
    ISOLATION = "isolation"
    """Sandboxes are isolated from the host. Only the engine `unsafe-none` lacks this."""


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
    """The current state of a sandbox, as its engine sees it."""

    state: State
    cause: Cause | None = None
    reason: str = ""
    wakes: bool = False
    """Whether the sandbox is paused and any use of it resumes it."""
    on_disk: bool = False
    """Whether the sandbox is paused and its memory is on disk."""


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
    """Resources in use. None means that the engine cannot determine the value."""

    memory_bytes: int | None = None
    cpu_s: float | None = None
    pids: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ListeningPort:
    """A TCP port that a process in a sandbox listens on."""

    port: int
    address: str
    """The local address inside, such as 127.0.0.1 or ::."""
    pid: int | None = None
    """The id, inside the sandbox, of the process that listens. None if the agent may not see it."""
    process: str | None = None
    """The name of that process."""


@dataclass(frozen=True, slots=True)
class ImageProgress:
    """The current step in preparing an image. `total_bytes` is None if the total is unknown."""

    stage: str
    """One of `wait`, `pull`, `build`, `extract`, `check`."""
    detail: str = ""
    """Details such as the layer or package."""
    done_bytes: int = 0
    total_bytes: int | None = None
    step: int = 0
    """Of a build: the number of the step in progress, from 1 on."""
    steps: int = 0


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
