"""Compute when each sandbox has to be checked next: its lifetime ends, it may be idle, or a deletion is tried again.

An operation in progress, a byte in or out, and a lease are uses. Activity inside that the manager does not see is
checked only when it matters: halfway through the idle timeout and at its end. A thousand sandboxes therefore cost only
two checks each per idle timeout.
"""

from __future__ import annotations

import asyncio
import math

from atoll.manager.context import ManagerContext
from atoll.manager.members import Member
from atoll.manager.record import Event, OnIdle
from atoll.model import Capability, State

_ENDS_IDLE = (State.RUNNING, State.STOPPED, State.ERROR)
"""States in which an idle sandbox ends. A stopped or unusable sandbox is kept only as long as somebody looks at it."""


class Schedule:
    """Computes what is due, and wakes the reaper when something becomes due before everything else."""

    def __init__(self, context: ManagerContext) -> None:
        self._context = context
        self._sooner = asyncio.Event()
        self._wakes_at = 0.0
        self._sweep_at = context.clock.now() + context.rules.cleanup_interval
        self.considered: set[str] = set()
        """The ids of sandboxes that are being checked right now."""

    # --- waking the reaper ----------------------------------------------------------------------------------------

    def notice(self, member: Member) -> None:
        """Note a change of this sandbox. The reaper goes through all sandboxes when woken, so it is woken only if
        necessary."""
        if self.due(member) < self._wakes_at:
            self.hurry()

    def on_event(self, event: Event) -> None:
        member = self._context.members.find(event.sandbox_id)
        if member is not None:
            self.notice(member)

    def hurry(self) -> None:
        """Wake the reaper, because a lifetime has changed or a deletion has failed."""
        self._sooner.set()

    def rules_changed(self) -> None:
        """Schedule everything anew, because any sandbox may now be due at another time."""
        self._sweep_at = min(self._sweep_at, self._context.clock.now() + self._context.rules.cleanup_interval)
        for member in self._context.members:
            member.look_again = 0.0
        self.hurry()

    async def until_due(self) -> None:
        """Return when something is due."""
        while True:
            self._sooner.clear()
            self._wakes_at = min([self._sweep_at, *(self.due(member) for member in self._context.members)])
            if await self._slept(max(0.0, self._wakes_at - self._context.clock.now())):
                return

    def begin_sweep(self) -> bool:
        """Whether it is time to check all sandboxes. If so, the next time is one interval later."""
        now = self._context.clock.now()
        if now < self._sweep_at:
            return False
        self._sweep_at = now + self._context.rules.cleanup_interval
        return True

    async def _slept(self, seconds: float) -> bool:
        """Sleep for this long. Returns False if a change ended the sleep early."""
        sleep = asyncio.ensure_future(self._context.clock.sleep(seconds))
        sooner = asyncio.ensure_future(self._sooner.wait())
        try:
            await asyncio.wait({sleep, sooner}, return_when=asyncio.FIRST_COMPLETED)
            return sleep.done()
        finally:
            sleep.cancel()
            sooner.cancel()
            await asyncio.gather(sleep, sooner, return_exceptions=True)

    # --- one sandbox ----------------------------------------------------------------------------------------------

    def due(self, member: Member) -> float:
        """Return when something has to be done about the sandbox, on the boot-time clock."""
        if member.waits_for_deletion:
            return member.next_try
        if member.is_being_deleted or member.creation is not None:
            return math.inf
        expires = member.record.expires_now
        idle = math.inf if member.id in self.considered else self.idle_due(member)
        return idle if expires is None else min(expires, idle)

    def idle_due(self, member: Member) -> float:
        """Return when to check whether the sandbox is idle. It may be used again before then."""
        if not member.free or member.waits_in_pool:
            return math.inf
        state = member.record.state
        if state is State.PAUSED:
            return max(member.look_again, min(self.sleep_end(member), self.disk_due(member)))
        if state not in _ENDS_IDLE:
            return math.inf
        timeout = self.timeout(member)
        if member.usage.active:
            return self._context.clock.now() + timeout
        since = self.idle_since(member)
        halfway = state is State.RUNNING and (member.background is None or member.background.at < since)
        return max(member.look_again, since + (timeout / 2 if halfway else timeout))

    def may_be_idle(self, member: Member) -> bool:
        """Whether it is time to check for activity inside."""
        if member.record.state not in _ENDS_IDLE:
            return False
        return self._context.clock.now() >= self.idle_since(member) + self.timeout(member) / 2

    def is_idle(self, member: Member) -> bool:
        if not member.free or member.record.state not in _ENDS_IDLE or member.usage.active:
            return False
        return self._context.clock.now() >= self.idle_since(member) + self.timeout(member)

    def idle_since(self, member: Member) -> float:
        return max(member.usage.last, member.record.leased_now or 0.0)

    def timeout(self, member: Member) -> float:
        """Return how long the sandbox may be unused before it ends or is paused."""
        if member.record.state is State.ERROR and self.on_idle(member) != "end":
            return self._context.rules.paused_timeout  # it would be paused if its engine were able to
        own = member.record.idle_timeout_s
        return self._context.rules.idle_timeout if own is None else own

    def on_idle(self, member: Member) -> OnIdle:
        wanted = member.record.on_idle or self._context.rules.on_idle
        return wanted if self._context.engines.declares(member.record.engine, Capability.PAUSE) else "end"

    def sleep_end(self, member: Member) -> float:
        """Return when a paused sandbox ends, unless it is used before."""
        since = max(member.paused_since, member.usage.last, member.record.leased_now or 0.0)
        return since + self._context.rules.paused_timeout

    def disk_due(self, member: Member) -> float:
        """Return when the memory of a paused sandbox is moved to the disk."""
        seconds = self._context.rules.disk_timeout
        if seconds is None or member.on_disk or member.stays_in_memory:
            return math.inf
        return member.paused_since + seconds if self.can_move_to_disk(member) else math.inf

    def can_move_to_disk(self, member: Member) -> bool:
        return self._context.engines.declares(member.record.engine, Capability.CHECKPOINTS)
