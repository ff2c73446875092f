"""Room for one more sandbox: the cap, the owners' shares, and what is done when all is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.errors import LimitReachedError
from atoll.manager.core import Core
from atoll.manager.members import Member
from atoll.manager.record import PausedBy
from atoll.manager.tasks import outcome
from atoll.model import Cause


class Room:
    """Asking and taking happen between two awaits: the cap is exact. A sandbox counts until nothing of it is left."""

    def __init__(self, core: Core) -> None:
        self.pause: Callable[[Member, PausedBy], asyncio.Task[None]]
        """Begins to pause a member; set by whoever can."""
        self.calm: Callable[[], None] = lambda: None
        """Called when somebody waits no longer; set by whoever holds back meanwhile."""
        self.waiting = 0
        """So many wait for a place. What becomes free is theirs, not for a pool."""
        self._core = core

    def taken(self) -> int:
        members = self._core.members
        # Where room is made by pausing, those that sleep have a limit of their own.
        return len(members) - (members.asleep() if self._pauses() else 0)

    def is_free(self, more: int = 1) -> bool:
        return self.taken() + more <= self._core.rules.max_sandboxes

    def free_for_waking(self) -> bool:
        """A sleeping one counts already unless sleeping makes room."""
        return not self._pauses() or self.is_free()

    def check_owner(self, owner: str | None, more: int = 1) -> None:
        limit = self._core.rules.max_per_owner
        if owner is not None and limit is not None and self._core.members.of_owner(owner) + more > limit:
            self._core.metrics.refusals["owner"] += 1
            raise LimitReachedError(
                f"Maximum number of sandboxes ({limit}) of owner {owner!r} reached", hint="Delete one of them first."
            )

    async def make(self, owner: str | None, more: int = 1, *, waking: bool = False) -> None:
        """Make some for this owner, or raise LimitReachedError. When it returns somebody else may have taken it.

        `waking`: for one that sleeps, whose own place among the sleepers becomes free.
        """
        if more > self._core.rules.max_sandboxes:
            raise self._full()
        self.waiting += 1
        try:
            await self._make(owner, waking)
        finally:
            self.waiting -= 1
            self.calm()

    async def _make(self, owner: str | None, waking: bool) -> None:
        if (spare := self._spare()) is not None:
            await self._core.ending.delete(spare, Cause.POLICY, "its place in the pool was needed")
            return
        victim = self._longest_idle(owner, waking) if self._pauses() else None
        if victim is None:
            raise self._full()
        await outcome(self.pause(victim, PausedBy.ROOM))

    def _spare(self) -> Member | None:
        """One of a pool, if possible one that is ready, else one on its way in or out."""
        spares = [each for each in self._core.members if each.waits_in_pool and not each.waits_for_deletion]
        return next((each for each in spares if each.usable), spares[0] if spares else None)

    def _full(self) -> LimitReachedError:
        self._core.metrics.refusals["sandboxes"] += 1
        return LimitReachedError(
            f"Maximum number of sandboxes ({self._core.rules.max_sandboxes}) reached",
            hint="Delete one, or raise max_sandboxes.",
        )

    def _pauses(self) -> bool:
        return self._core.rules.at_cap != "refuse"

    def _longest_idle(self, owner: str | None, waking: bool) -> Member | None:
        """One of the owner's own, unless the rules let everybody make way for everybody."""
        rules, members, now = self._core.rules, self._core.members, self._core.clock.now()
        limit = rules.max_sandboxes if rules.max_paused is None else rules.max_paused
        if members.asleep() + members.falling_asleep() - waking >= limit:
            return None
        idle = [
            member
            for member in members
            if member.usable
            and not member.usage.active
            and not member.waits_in_pool
            and (member.record.leased_now or 0.0) <= now
            and (rules.at_cap == "pause-any" or member.record.owner == owner)
        ]
        return max(idle, key=lambda member: member.usage.idle_s(), default=None)
