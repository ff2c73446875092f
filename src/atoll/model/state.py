"""What an engine reports: its capabilities, the state of a sandbox and the cause of its end, the resources in use, and
the progress of an image."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Capability(enum.StrEnum):
    """A feature or a limit that an engine declares and therefore enforces."""

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
    """The states of a sandbox's files can be saved and restored, and new sandboxes can start from them."""
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


@dataclass(frozen=True, slots=True)
class Stats:
    """Resources in use. None means that the engine cannot determine the value."""

    memory_bytes: int | None = None
    cpu_s: float | None = None
    pids: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ImageProgress:
    """The current step in preparing an image. `total_bytes` is None if the total is unknown."""

    stage: str
    """One of `wait`, `pull`, `build`, `extract`, `check`."""
    detail: str = ""
    """Details such as the layer or package."""
    done_bytes: int = 0
    total_bytes: int | None = None
