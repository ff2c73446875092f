"""Ends what nobody uses, what has lived long enough and what has died, and tries again what could not be ended.

It sleeps until the first of these is due and is woken when something earlier appears. What is due by the clock is done
at once; whoever has to be looked at first is looked at beside that, so that an engine which hangs delays nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import math

from atoll.manager.core import Core
from atoll.manager.idling import Idling
from atoll.manager.members import Member
from atoll.manager.pools import Pools
from atoll.manager.record import Event
from atoll.model import Cause, State

_AT_ONCE = 32
_REST_S = 60.0
"""After so long without use the connection is closed: a thousand idle sandboxes need no thousand descriptors."""
_JUMP_S = 0.5
_log = logging.getLogger(__name__)


class Reaper:
    def __init__(self, core: Core, pools: Pools) -> None:
        self._core = core
        self._pools = pools
        self._idling = Idling(core)
        self._sooner = asyncio.Event()
        self._looks = asyncio.Semaphore(_AT_ONCE)
        self._considered: set[str] = set()
        self._wakes_at = 0.0
        self._sweep_at = core.clock.now() + core.rules.cleanup_interval
        self._sweeping: asyncio.Task[list[asyncio.Task[None]]] | None = None
        self._offset = core.clock.wall() - core.clock.now()
        core.ledger.listeners.append(self._on_event)
        core.ending.on_failure = self.hurry
        core.noticed = self._notice

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self._until_due()
            self._follow_wall_clock()
            now = self._core.clock.now()
            for member in self._core.members:
                if not self._end_if_over(member) and self._idling.due(member) <= now:
                    self._begin_to_consider(member)
            if now >= self._sweep_at and (self._sweeping is None or self._sweeping.done()):
                self._sweep_at = now + self._core.rules.cleanup_interval
                self._sweeping = self._core.tasks.spawn(self.sweep(), "sweep")

    def hurry(self) -> None:
        """A lifetime has changed, or a deletion failed."""
        self._sooner.set()

    def rules_changed(self) -> None:
        """Everything may be due at another time than it was."""
        self._sweep_at = min(self._sweep_at, self._core.clock.now() + self._core.rules.cleanup_interval)
        for member in self._core.members:
            member.look_again = 0.0
        self.hurry()

    def _on_event(self, event: Event) -> None:
        member = self._core.members.find(event.sandbox_id)
        if member is not None:
            self._notice(member)

    def _notice(self, member: Member) -> None:
        """Wake up if it is due before everything else. Not for every change: all members are looked at for that."""
        if self._due(member) < self._wakes_at:
            self.hurry()

    def _due(self, member: Member) -> float:
        if member.waits_for_deletion:
            return member.next_try
        if member.doomed or member.making is not None:
            return math.inf
        expires = member.record.expires_now
        idle = math.inf if member.id in self._considered else self._idling.due(member)
        return idle if expires is None else min(expires, idle)

    async def sweep(self) -> list[asyncio.Task[None]]:
        """Look at all of them. What has to end is on its way afterwards: the tasks that see to it."""
        self._follow_wall_clock()
        members = list(self._core.members)
        await asyncio.gather(*(self._look_and_consider(member) for member in members))
        self._pools.tidy()
        await self._rest()
        return [member.ending for member in members if member.ending is not None]

    async def _look_and_consider(self, member: Member) -> None:
        if self._end_if_over(member) or not member.free:
            return
        await self._look(member)
        await self._idling.consider(member)

    def _end_if_over(self, member: Member) -> bool:
        """Whatever is being done to it: that is waited for, or given up."""
        begin, record, now = self._core.ending.begin, member.record, self._core.clock.now()
        if member.waits_for_deletion and now >= member.next_try:
            begin(member, record.cause or Cause.HOST, record.reason)
        if member.doomed or member.making is not None:
            return True
        if record.expires_now is None or now < record.expires_now:
            return False
        begin(member, Cause.TIMEOUT, f"its lifetime of {record.lifetime_s:g} s is over")
        return True

    def _begin_to_consider(self, member: Member) -> None:
        if member.id in self._considered:
            return
        self._considered.add(member.id)

        async def work() -> None:
            try:
                await self._idling.consider(member)
            finally:
                self._considered.discard(member.id)
                self._notice(member)

        self._core.tasks.spawn(work(), f"consider {member.id}")

    async def _look(self, member: Member) -> None:
        if member.record.state is not State.PAUSED and not member.usage.active:
            async with self._looks:
                await self._core.health.look(member)

    async def _rest(self) -> None:
        for member in self._core.members:
            if member.usable and not member.waits_in_pool and member.usage.idle_s() >= _REST_S:
                await member.sandbox.rest()

    def _follow_wall_clock(self) -> None:
        """Lifetimes are kept by a clock that does not jump. If the other one was set, the times that are shown, and
        that a restart of the machine is survived with, are no longer right."""
        offset = self._core.clock.wall() - self._core.clock.now()
        jump, self._offset = offset - self._offset, offset
        if abs(jump) < _JUMP_S:
            return
        _log.warning("the clock was set by %+.1f s: recorded times are adjusted", jump)
        for member in self._core.members:
            record = member.record
            moments = {name: getattr(record, name) for name in ("expires_at", "leased_until", "paused_at")}
            update = {name: moment + jump for name, moment in moments.items() if moment is not None}
            if update:
                self._core.ledger.correct(member, update)

    async def _until_due(self) -> None:
        """Return when something is due."""
        while True:
            self._sooner.clear()
            self._wakes_at = min([self._sweep_at, *(self._due(member) for member in self._core.members)])
            if await self._slept(max(0.0, self._wakes_at - self._core.clock.now())):
                return

    async def _slept(self, seconds: float) -> bool:
        """False: something changed before."""
        sleep = asyncio.ensure_future(self._core.clock.sleep(seconds))
        sooner = asyncio.ensure_future(self._sooner.wait())
        try:
            await asyncio.wait({sleep, sooner}, return_when=asyncio.FIRST_COMPLETED)
            return sleep.done()
        finally:
            sleep.cancel()
            sooner.cancel()
            await asyncio.gather(sleep, sooner, return_exceptions=True)
