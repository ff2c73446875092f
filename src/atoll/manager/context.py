"""What the parts of a manager share."""

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


class Operations(Protocol):
    """What is done to sandboxes, as the parts below `operations` ask for it.

    This is the one cycle among the parts of a manager: creating a sandbox may need room, room is made by pausing or
    deleting another, and the supervisor of each sandbox wakes, forks and deletes it. `wiring` closes the circle.
    """

    async def delete(self, member: Member, cause: Cause, reason: str) -> None:
        """Return when nothing is left of it. Cancelling the caller does not stop it."""

    def begin_delete(self, member: Member, cause: Cause, reason: str) -> asyncio.Task[None]:
        """Delete it in a task, which several calls share. From now on nobody gets the sandbox."""

    def begin_pause(self, member: Member, by: PausedBy) -> asyncio.Task[None]:
        """Pause one that is usable, whatever becomes of the caller."""

    async def resume(self, member: Member) -> None:
        """Let its processes go on. LimitReachedError when there is no room for it."""

    async def fork_unnamed(
        self, source: Member, count: int, checkpoint: str | None, memory: bool, drop_connections: bool
    ) -> list[Member]:
        """Make sandboxes without names of their own that begin as this one: all of them, or none."""


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
    """Marks the manager's sandboxes, so that they are known also when the journal is lost."""
    on_use: Callable[[str], None]
    """Called with the id of a sandbox whenever a use of it begins."""
    tasks: Tasks = field(default_factory=Tasks)
    metrics: Metrics = field(default_factory=Metrics)
    closing: bool = False

    @property
    def engine(self) -> Engine:
        """The engine for sandboxes that ask for none in particular."""
        return self.engines.default

    def engine_of(self, member: Member) -> Engine:
        return self.engines.get(member.record.engine)

    def refuse_if_closing(self) -> None:
        if self.closing:
            raise ManagerClosedError("the manager is shutting down", hint="Make a new SandboxManager.")

    def expiry(self, lifetime_s: float | None) -> dict[str, object]:
        """The fields of a record that ends this long from now, on both clocks."""
        return {
            "lifetime_s": lifetime_s,
            "expires_at": None if lifetime_s is None else self.clock.wall() + lifetime_s,
            "expires_now": None if lifetime_s is None else self.clock.now() + lifetime_s,
            "boot_id": self.clock.boot_id,
        }

    def shortened(self, lifetime_s: float | None) -> float | None:
        """The lifetime that a sandbox gets when this one is asked for."""
        most = self.rules.max_lifetime
        return lifetime_s if most is None else min(lifetime_s or most, most)
