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
from atoll.manager.clock import Clock, SystemClock
from atoll.manager.core import Rules
from atoll.manager.manager import SandboxManager
from atoll.manager.pool import PoolSettings
from atoll.manager.record import Act, CommandEnd, Event, OnIdle, PausedBy, Record
from atoll.manager.recovery import Recovered
from atoll.manager.request import fork_key
from atoll.manager.retention import Retention
from atoll.manager.sandbox import ManagedSandbox
from atoll.manager.shutdown import Shutdown
from atoll.manager.usage import Usage

__all__ = [
    "Act",
    "Clock",
    "CommandEnd",
    "ConflictError",
    "Event",
    "LimitReachedError",
    "ManagedSandbox",
    "ManagerClosedError",
    "OnIdle",
    "PausedBy",
    "PoolSettings",
    "Record",
    "Recovered",
    "Retention",
    "Rules",
    "SandboxManager",
    "Shutdown",
    "StateError",
    "StateInUseError",
    "SystemClock",
    "Usage",
    "fork_key",
]
