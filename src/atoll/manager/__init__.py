"""Many sandboxes in one process: limits, an idle reaper, warm pools, and recovery after a crash.

`SandboxManager` is the whole of it for its users; the rest are the values it takes and gives.
"""

from atoll.errors import (
    ConflictError,
    LimitReachedError,
    ManagerClosedError,
    StateError,
    StateInUseError,
)
from atoll.manager.managed_sandbox import ManagedSandbox
from atoll.manager.manager import SandboxManager
from atoll.manager.pool import PoolSettings
from atoll.manager.record import CommandEnd, Event, OnIdle, Operation, PausedBy, Record
from atoll.manager.recovery import Recovered
from atoll.manager.request import SandboxOptions, fork_key
from atoll.manager.rules import Retention, Rules
from atoll.manager.usage import Usage
from atoll.manager.wiring import Shutdown
from atoll.timer import Clock, SystemClock

__all__ = [
    "Clock",
    "CommandEnd",
    "ConflictError",
    "Event",
    "LimitReachedError",
    "ManagedSandbox",
    "ManagerClosedError",
    "OnIdle",
    "Operation",
    "PausedBy",
    "PoolSettings",
    "Record",
    "Recovered",
    "Retention",
    "Rules",
    "SandboxManager",
    "SandboxOptions",
    "Shutdown",
    "StateError",
    "StateInUseError",
    "SystemClock",
    "Usage",
    "fork_key",
]
