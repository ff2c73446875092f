"""The states of a sandbox in the words of OpenHands, which the REST API uses too."""

from __future__ import annotations

import enum

from atoll.model.state import State


class SandboxStatus(enum.StrEnum):
    """The state of a sandbox in the words of OpenHands."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    ERROR = "ERROR"
    """The sandbox has ended by itself, or its engine cannot report on it."""
    MISSING = "MISSING"
    """The sandbox is gone."""


STATUS = {
    State.STARTING: SandboxStatus.STARTING,
    State.RUNNING: SandboxStatus.RUNNING,
    State.PAUSED: SandboxStatus.PAUSED,
    State.STOPPED: SandboxStatus.ERROR,
    State.ERROR: SandboxStatus.ERROR,
    State.MISSING: SandboxStatus.MISSING,
}
