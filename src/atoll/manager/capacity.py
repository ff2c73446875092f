"""Enforce the cap and the maximum per owner, and make room when the cap is reached."""

from __future__ import annotations

from atoll.errors import LimitReachedError
from atoll.manager.context import ManagerContext, Operations
from atoll.manager.members import Member
from atoll.manager.pool import Pools
from atoll.manager.record import PausedBy
from atoll.manager.tasks import outcome
from atoll.model import Cause


class Capacity:
    """Decides whether there is room for another sandbox.

    A caller checks for room and takes it without an await in between, so the cap is exact. A sandbox counts until it is
    completely deleted.
    """

    def __init__(self, context: ManagerContext, operations: Operations, pools: Pools) -> None:
        self.waiting = 0
        """The number of callers that wait for a place. A place that becomes free is for them, so pools make no spares
        meanwhile."""
        self._context = context
        self._operations = operations
        self._pools = pools

    def is_free(self, more: int = 1) -> bool:
        members = self._context.members
        # Where room is made by pausing, paused sandboxes have a limit of their own.
        taken = len(members) - (members.asleep() if self._pauses() else 0)
        return taken + more <= self._context.rules.max_sandboxes

    def is_free_for_waking(self) -> bool:
        """Whether a paused sandbox may be resumed. Unless pausing makes room, it is counted already."""
        return not self._pauses() or self.is_free()

    def check_owner(self, owner: str | None, more: int = 1) -> None:
        """Raise LimitReachedError if this owner may not have `more` additional sandboxes."""
        limit = self._context.rules.max_per_owner
        if owner is not None and limit is not None and self._context.members.of_owner(owner) + more > limit:
            self._context.metrics.refusals["owner"] += 1
            raise LimitReachedError(
                f"Maximum number of sandboxes ({limit}) of owner {owner!r} reached", hint="Delete one of them first."
            )

    async def make_room(self, owner: str | None, more: int = 1, *, waking: bool = False) -> None:
        """Make room for this owner, or raise LimitReachedError. By the time it returns, another caller may have taken
        the room.

        `waking` says that the room is for a paused sandbox, whose own place among the paused ones becomes free.
        """
        if more > self._context.rules.max_sandboxes:
            raise self._full()
        self.waiting += 1
        try:
            if (spare := self._spare()) is not None:
                await self._operations.delete(spare, Cause.POLICY, "its place in the pool was needed")
                return
            victim = self._longest_idle(owner, waking) if self._pauses() else None
            if victim is None:
                raise self._full()
            await outcome(self._operations.begin_pause(victim, PausedBy.ROOM))
        finally:
            self.waiting -= 1
            self._pools.wake()

    def _spare(self) -> Member | None:
        """Return a spare of any pool: preferably a ready one, else one that is being created or deleted."""
        spares = [each for each in self._context.members if each.waits_in_pool and not each.waits_for_deletion]
        return next((each for each in spares if each.usable), spares[0] if spares else None)

    def _full(self) -> LimitReachedError:
        self._context.metrics.refusals["sandboxes"] += 1
        return LimitReachedError(
            f"Maximum number of sandboxes ({self._context.rules.max_sandboxes}) reached",
            hint="Delete one, or raise max_sandboxes.",
        )

    def _pauses(self) -> bool:
        return self._context.rules.at_cap != "refuse"

    def _longest_idle(self, owner: str | None, waking: bool) -> Member | None:
        """Return the sandbox that has been idle longest. It belongs to this owner unless `at_cap` is "pause-any"."""
        rules, members, now = self._context.rules, self._context.members, self._context.clock.now()
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
