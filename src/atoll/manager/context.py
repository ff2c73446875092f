"""State that all parts of a manager share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from atoll.engines.contract import Engine
from atoll.errors import ManagerClosedError
from atoll.manager.engine_set import EngineSet
from atoll.manager.journal import Journal
from atoll.manager.members import Member, Members
from atoll.manager.metrics import Metrics
from atoll.manager.record import PausedBy
from atoll.manager.rules import Rules
from atoll.manager.tasks import Tasks
from atoll.manager.transitions import Transitions
from atoll.model import Cause
from atoll.settings import Settings
from atoll.timer import Clock
from atoll.workers import Shares

_CHECKS, _CHECKS_OF_ONE = 8, 2


class Operations(Protocol):
    """Operations on sandboxes, as requested by parts that the `operations` package itself depends on.

    The parts of a manager form one cycle: creating a sandbox may need room, room is made by pausing or deleting another
    sandbox, and the supervisor of each sandbox resumes, forks and deletes it. This protocol breaks the cycle, and
    `wiring` supplies its implementation.
    """

    async def delete(self, member: Member, cause: Cause, reason: str) -> None:
        """Delete the sandbox and return when nothing of it is left. Cancelling the caller does not stop the
        deletion."""

    def begin_delete(self, member: Member, cause: Cause, reason: str) -> asyncio.Task[None]:
        """Delete the sandbox in a task, which repeated calls share. From now on nobody can get the sandbox."""

    def begin_pause(self, member: Member, by: PausedBy) -> asyncio.Task[None]:
        """Pause a usable sandbox in a task that goes on if the caller is cancelled."""

    async def resume(self, member: Member) -> None:
        """Let the sandbox's processes go on. Raises LimitReachedError when there is no room for it."""

    async def fork_unnamed(
        self, source: Member, count: int, checkpoint: str | None, memory: bool, drop_connections: bool
    ) -> list[Member]:
        """Create sandboxes without names of their own that start from the state of `source`: all of them, or none."""


@dataclass(slots=True)
class ManagerContext:
    rules: Rules
    engines: EngineSet
    settings: Settings
    clock: Clock
    journal: Journal
    members: Members
    transitions: Transitions
    manager_id: str
    """Marks the manager's sandboxes, so that they can be recognized even if the journal is lost."""
    on_use: Callable[[str], None]
    """Called with the id of a sandbox whenever a use of it begins."""
    tasks: Tasks = field(default_factory=Tasks)
    metrics: Metrics = field(default_factory=Metrics)
    checks: Shares = field(default_factory=lambda: Shares(_CHECKS, _CHECKS_OF_ONE))
    """Turns to check whether a new sandbox is ready."""
    closing: bool = False

    @property
    def engine(self) -> Engine:
        """The engine of sandboxes that do not ask for a particular one."""
        return self.engines.default

    def engine_of(self, member: Member) -> Engine:
        return self.engines.get(member.record.engine)

    def refuse_if_closing(self) -> None:
        if self.closing:
            raise ManagerClosedError("the manager is shutting down", hint="Make a new SandboxManager.")

    def expiry(self, lifetime_s: float | None) -> dict[str, object]:
        """Return the record fields of a sandbox that ends after `lifetime_s`, on the wall clock and on the boot-time
        clock, which does not jump."""
        return {
            "lifetime_s": lifetime_s,
            "expires_at": None if lifetime_s is None else self.clock.wall() + lifetime_s,
            "expires_now": None if lifetime_s is None else self.clock.now() + lifetime_s,
            "boot_id": self.clock.boot_id,
        }

    def shortened(self, lifetime_s: float | None) -> float | None:
        """Return the lifetime that a sandbox gets when this one is requested: at most `max_lifetime`."""
        most = self.rules.max_lifetime
        return lifetime_s if most is None else min(lifetime_s or most, most)
