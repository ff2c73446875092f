"""End sandboxes that are idle, expired or dead, and retry deletions that failed.

The reaper sleeps until the first of these is due, and is woken when something becomes due earlier. What the clock alone
decides is done at once. Sandboxes that have to be checked first are checked in tasks of their own, so that an engine
that hangs delays no other sandbox. A sandbox that used the processor, wrote output or sent data between two checks is
busy, which is a use.
"""

from __future__ import annotations

import asyncio
import logging

from atoll.errors import SandboxError
from atoll.manager.context import ManagerContext
from atoll.manager.health import Health, is_busy
from atoll.manager.members import Member
from atoll.manager.operations.delete import Deleter
from atoll.manager.operations.pause import Pauser
from atoll.manager.pool import Pools
from atoll.manager.record import OnIdle, PausedBy
from atoll.manager.schedule import Schedule
from atoll.model import Cause, State

_AT_ONCE = 32
_REST_S = 60.0
"""After this many seconds without use the connection is closed, so that a thousand idle sandboxes do not need a
thousand descriptors."""
_SOON_S = 1.0
_JUMP_S = 0.5
_log = logging.getLogger(__name__)


class Reaper:
    def __init__(
        self,
        context: ManagerContext,
        schedule: Schedule,
        health: Health,
        deleter: Deleter,
        pauser: Pauser,
        pools: Pools,
    ) -> None:
        self._context = context
        self._schedule = schedule
        self._health = health
        self._deleter = deleter
        self._pauser = pauser
        self._pools = pools
        self._looks = asyncio.Semaphore(_AT_ONCE)
        self._asks = asyncio.Semaphore(_AT_ONCE)
        self._sweeping: asyncio.Task[list[asyncio.Task[None]]] | None = None
        self._offset = context.clock.wall() - context.clock.now()

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self._schedule.until_due()
            self._follow_wall_clock()
            now = self._context.clock.now()
            for member in self._context.members:
                if not self._end_if_over(member) and self._schedule.idle_due(member) <= now:
                    self._begin_to_consider(member)
            if (self._sweeping is None or self._sweeping.done()) and self._schedule.begin_sweep():
                self._sweeping = self._context.tasks.spawn(self.sweep(), "sweep")

    async def sweep(self) -> list[asyncio.Task[None]]:
        """Check all sandboxes. Returns the deletions that are then in progress."""
        self._follow_wall_clock()
        members = list(self._context.members)
        await asyncio.gather(*(self._look_and_consider(member) for member in members))
        self._pools.tidy()
        await self._rest()
        return [member.deletion for member in members if member.deletion is not None]

    # --- all of them ----------------------------------------------------------------------------------------------

    async def _look_and_consider(self, member: Member) -> None:
        if self._end_if_over(member) or not member.free:
            return
        if member.record.state is not State.PAUSED and not member.usage.active:
            async with self._looks:
                await self._health.look(member)
        await self._consider(member)

    def _end_if_over(self, member: Member) -> bool:
        """Start to delete the sandbox if its lifetime is over, or again if deleting it failed.

        Returns True if the sandbox is being deleted or created, so that no further check is needed. An operation in
        progress does not matter, because a deletion waits for it or interrupts it.
        """
        record, now = member.record, self._context.clock.now()
        if member.waits_for_deletion and now >= member.next_try:
            self._deleter.begin(member, record.cause or Cause.HOST, record.reason)
        if member.is_being_deleted or member.creation is not None:
            return True
        if record.expires_now is None or now < record.expires_now:
            return False
        self._deleter.begin(member, Cause.TIMEOUT, f"its lifetime of {record.lifetime_s:g} s is over")
        return True

    def _begin_to_consider(self, member: Member) -> None:
        considered = self._schedule.considered
        if member.id in considered:
            return
        considered.add(member.id)

        async def work() -> None:
            try:
                await self._consider(member)
            finally:
                considered.discard(member.id)
                self._schedule.notice(member)

        self._context.tasks.spawn(work(), f"consider {member.id}")

    async def _rest(self) -> None:
        for member in self._context.members:
            if member.usable and not member.waits_in_pool and member.usage.idle_s() >= _REST_S:
                await member.sandbox.rest()

    def _follow_wall_clock(self) -> None:
        """Adjust recorded times if the wall clock was set.

        Lifetimes follow the boot-time clock, which does not jump. Wall clock times are recorded only to be shown to
        users, and to outlast a restart of the machine.
        """
        offset = self._context.clock.wall() - self._context.clock.now()
        jump, self._offset = offset - self._offset, offset
        if abs(jump) < _JUMP_S:
            return
        _log.warning("the clock was set by %+.1f s: recorded times are adjusted", jump)
        for member in self._context.members:
            record = member.record
            moments = {name: getattr(record, name) for name in ("expires_at", "leased_until", "paused_at")}
            update = {name: moment + jump for name, moment in moments.items() if moment is not None}
            if update:
                self._context.transitions.correct(member, update)

    # --- one that may be idle -------------------------------------------------------------------------------------

    async def _consider(self, member: Member) -> None:
        """End or pause the sandbox, if it is time and nobody uses it."""
        if not member.free or member.waits_in_pool:
            return
        if member.record.state is State.PAUSED:
            await self._consider_asleep(member)
        elif self._schedule.may_be_idle(member):
            member.look_again = self._context.clock.now() + _SOON_S
            if not await self._is_silent(member):
                return
            await self._context.engines.learn(member.record.engine)
            if self._schedule.is_idle(member):  # no await between this check and the decision
                await self._end_or_pause(member)

    async def _end_or_pause(self, member: Member) -> None:
        record = member.record
        if record.state is State.ERROR:
            await self._health.look(member)  # the engine may be able to say more by now
            record = member.record
            if record.state is not State.ERROR or not self._schedule.is_idle(member):
                return
        if record.state in (State.STOPPED, State.ERROR):
            self._deleter.begin(member, record.cause or Cause.LOST, record.reason)
            return
        wanted = self._schedule.on_idle(member)
        if wanted != "end":
            await self._pause(member, wanted)
        elif member.background is not None and member.background.listens.intersection(record.services):
            member.usage.touch()
        else:
            reason = f"nobody used it for {self._schedule.timeout(member):g} s"
            self._deleter.begin(member, Cause.POLICY, reason)

    async def _pause(self, member: Member, wanted: OnIdle) -> None:
        if wanted == "disk" and self._schedule.can_move_to_disk(member):
            try:
                await self._pauser.pause(member, disk=True, by=PausedBy.IDLE)
                return
            except SandboxError as error:
                _log.info(
                    "sandbox %s is paused in memory, not to disk: %s", member.id, error, extra={"sandbox_id": member.id}
                )
        try:
            if member.usable and self._schedule.is_idle(member):
                await self._pauser.begin(member, PausedBy.IDLE)
        except SandboxError as error:
            self._context.metrics.failures["pause"] += 1
            _log.warning("sandbox %s could not be paused: %s", member.id, error, extra={"sandbox_id": member.id})
            member.usage.touch()  # so it is tried again after another timeout

    async def _consider_asleep(self, member: Member) -> None:
        now = self._context.clock.now()
        if now >= self._schedule.sleep_end(member):
            seconds = self._context.rules.paused_timeout
            self._deleter.begin(member, Cause.POLICY, f"it was paused and nobody used it for {seconds:g} s")
        elif now >= self._schedule.disk_due(member):
            member.stays_in_memory = True  # tried only once
            try:
                await self._pauser.move_to_disk(member)
            except SandboxError as error:
                _log.info("sandbox %s stays paused in memory: %s", member.id, error, extra={"sandbox_id": member.id})

    async def _is_silent(self, member: Member) -> bool:
        """Whether nothing goes on inside. Unless nothing runs at all, this takes two checks."""
        if member.record.state is not State.RUNNING:
            return True
        async with self._asks:
            before, seen = member.background, await self._health.background(member)
        member.background = seen
        if seen is None:
            return True
        if before is None or before.at < self._schedule.idle_since(member):
            # Two checks in quick succession would mistake a short pause for idleness.
            member.look_again = seen.at + max(_SOON_S, self._schedule.timeout(member) / 4)
            return not seen.running
        if is_busy(member, before, seen):
            member.usage.touch()
        return True
