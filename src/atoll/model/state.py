"""What an engine reports: its powers, the state of a sandbox and why it ended, what is in use, how far an image is."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
