"""Ends what nobody uses, what has lived long enough and what has died, and tries again what could not be ended."""

from __future__ import annotations

import asyncio
import logging
import math

from atoll.errors import SandboxError
from atoll.manager.core import Core
from atoll.manager.members import Member
from atoll.manager.pools import Pools
from atoll.manager.record import Event
from atoll.model import Cause, State

_AT_ONCE = 32
_REST_S = 60.0
"""After so long without use the connection is closed: a thousand idle sandboxes need no thousand descriptors."""
_log = logging.getLogger(__name__)


class Reaper:
    def __init__(self, core: Core, pools: Pools) -> None:
        self._core = core
        self._pools = pools
        self._sooner = asyncio.Event()
        self._looks = asyncio.Semaphore(_AT_ONCE)
        core.ledger.listeners.append(self._on_event)
        core.ending.on_failure = self.hurry

    async def run(self) -> None:
        """Never returns. It comes at least every `cleanup_interval`, and when a lifetime is over."""
        while True:
            await self._until_due()
            try:
                await self.sweep()
            except SandboxError as error:
                _log.warning("a sweep failed: %s", error)

    def hurry(self) -> None:
        """A lifetime has changed, or a deletion failed."""
        self._sooner.set()

    def _on_event(self, event: Event) -> None:
        """Not for every change: to find what is due next, all members are looked at."""
        member = self._core.members.find(event.sandbox_id)
        if member is None:
            return
        if event.act is None and event.after is State.RUNNING and member.record.expires_now is not None:
            self.hurry()

    async def sweep(self) -> list[asyncio.Task[None]]:
        """Look at all of them. What has to end is on its way afterwards: the tasks that see to it."""
        members = list(self._core.members)
        await asyncio.gather(*(self._consider(member) for member in members))
        self._pools.tidy()
        await self._rest()
        return [member.ending for member in members if member.ending is not None]

    async def _consider(self, member: Member) -> None:
        core, now = self._core, self._core.clock.now()
        begin, record = core.ending.begin, member.record
        if member.waits_for_deletion and now >= member.next_try:
            begin(member, record.cause or Cause.HOST, record.reason)
        if not member.free:
            return
        if record.expires_now is not None and now >= record.expires_now:
            begin(member, Cause.TIMEOUT, f"its lifetime of {record.lifetime_s:g} s is over")
            return
        await self._look(member)
        if member.waits_in_pool or not await self._is_silent(member):
            return
        if not self._is_idle(member):  # nothing may run between this question and its consequence
            return
        if member.record.state is State.STOPPED:
            begin(member, member.record.cause or Cause.LOST, member.record.reason)
        else:
            begin(member, Cause.POLICY, f"nobody used it for {core.rules.idle_timeout:g} s")

    async def _look(self, member: Member) -> None:
        if member.record.state is not State.PAUSED and not member.usage.active:
            async with self._looks:
                await self._core.health.look(member)

    def _is_idle(self, member: Member) -> bool:
        """Whether it has to end for that. One that sleeps was put to sleep to be kept."""
        if not member.free or member.record.state not in (State.RUNNING, State.STOPPED):
            return False
        return member.usage.idle_s() >= self._core.rules.idle_timeout

    async def _is_silent(self, member: Member) -> bool:
        """Whether no command of its own has written anything lately, which is a use though nobody reads it.

        To know that one has to ask twice; the first time is well before it matters.
        """
        if member.record.state is not State.RUNNING or member.usage.idle_s() < self._core.rules.idle_timeout / 2:
            return True
        async with self._looks:
            before, member.background = member.background, await self._core.health.background(member)
        now = member.background
        if now is None or not now.running:
            return True
        if before is not None and before.output_bytes != now.output_bytes:
            member.usage.touch()
        return before is not None

    async def _rest(self) -> None:
        for member in self._core.members:
            if member.usable and not member.waits_in_pool and member.usage.idle_s() >= _REST_S:
                await member.sandbox.rest()

    async def _until_due(self) -> None:
        """Return after the interval, or when the first lifetime is over or a deletion is to be tried again."""
        interval = self._core.clock.now() + self._core.rules.cleanup_interval
        while True:
            self._sooner.clear()
            members = list(self._core.members)
            due = [member.record.expires_now or math.inf for member in members if member.free]
            due += [member.next_try for member in members if member.waits_for_deletion]
            seconds = max(0.0, min([interval, *due]) - self._core.clock.now())
            if await self._slept(seconds):
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
