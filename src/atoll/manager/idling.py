"""Which members nobody uses, and what becomes of those: they end, or sleep until somebody comes, and end later.

An operation under way, a byte in or out, and a lease are a use. What goes on inside without us is looked at only when
it matters: halfway through the time that a member may be without use, and at its end. If it used the processor, wrote
or sent anything in between, it is busy, which is a use. So a thousand members cost two looks each in all that time.
"""

from __future__ import annotations

import asyncio
import logging
import math

from atoll.engines.base import Checkpointing, Pausable
from atoll.errors import SandboxError
from atoll.manager.core import Core
from atoll.manager.members import Background, Member
from atoll.manager.record import OnIdle, PausedBy
from atoll.model import Capability, Cause, State

_BUSY_SHARE = 0.01
"""Share of one processor, over the time between the two looks. Waiting for something to happen takes less."""
_BUSY_SHARE_VIRTUAL = 0.1
"""A kernel in user space takes some hundredths of a processor by itself, also when nothing runs on it."""
_BUSY_LEAST_S = 0.04
_AT_ONCE = 32
_SOON_S = 1.0
_ENDS_IDLE = (State.RUNNING, State.STOPPED, State.ERROR)
"""Also one that has ended or cannot be used is there only as long as somebody looks at it."""
_log = logging.getLogger(__name__)


class Idling:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._looks = asyncio.Semaphore(_AT_ONCE)

    def due(self, member: Member) -> float:
        """When a sandbox has to be considered next, by the clock that does not jump. It may be used again before."""
        if not member.free or member.waits_in_pool:
            return math.inf
        state = member.record.state
        if state is State.PAUSED:
            return max(member.look_again, min(self._end_asleep(member), self._disk(member)))
        if state not in _ENDS_IDLE:
            return math.inf
        timeout = self._timeout(member)
        if member.usage.active:
            return self._core.clock.now() + timeout
        since = self._since(member)
        halfway = state is State.RUNNING and (member.background is None or member.background.at < since)
        return max(member.look_again, since + (timeout / 2 if halfway else timeout))

    async def consider(self, member: Member) -> None:
        """End it or put it to sleep, if it is time and nobody uses it."""
        if not member.free or member.waits_in_pool:
            return
        now = self._core.clock.now()
        if member.record.state is State.PAUSED:
            await self._asleep(member, now)
        elif member.record.state in _ENDS_IDLE:
            if now < self._since(member) + self._timeout(member) / 2:
                return
            member.look_again = now + _SOON_S
            if not await self._is_silent(member):
                return
            if self._is_idle(member):  # nothing may run between this question and its consequence
                await self._step(member)

    async def _step(self, member: Member) -> None:
        core, record = self._core, member.record
        if record.state is State.ERROR:
            await core.health.look(member)  # the engine may be able to say more by now
            record = member.record
            if record.state is not State.ERROR or not self._is_idle(member):
                return
        if record.state in (State.STOPPED, State.ERROR):
            core.ending.begin(member, record.cause or Cause.LOST, record.reason)
            return
        wanted = self._on_idle(member)
        if wanted != "end":
            await self._pause(member, wanted)
        elif member.background is not None and member.background.listens.intersection(record.services):
            member.usage.touch()
        else:
            core.ending.begin(member, Cause.POLICY, f"nobody used it for {self._timeout(member):g} s")

    async def _pause(self, member: Member, wanted: OnIdle) -> None:
        pausing = self._core.pausing
        if wanted == "disk" and self._has_disk(member):
            try:
                await pausing.pause(member, disk=True, by=PausedBy.IDLE)
                return
            except SandboxError as error:
                _log.info("sandbox %s sleeps in memory, not on the disk: %s", member.id, error)
        try:
            if member.usable and self._is_idle(member):
                await pausing.begin_pause(member, PausedBy.IDLE)
        except SandboxError as error:
            self._core.metrics.failures["pause"] += 1
            _log.warning("sandbox %s could not be paused: %s", member.id, error)
            member.usage.touch()  # in so long again

    async def _asleep(self, member: Member, now: float) -> None:
        if now >= self._end_asleep(member):
            seconds = self._core.rules.paused_timeout
            self._core.ending.begin(member, Cause.POLICY, f"it was paused and nobody used it for {seconds:g} s")
        elif now >= self._disk(member):
            member.stays_in_memory = True  # tried once
            try:
                await self._core.pausing.move_to_disk(member)
            except SandboxError as error:
                _log.info("sandbox %s stays paused in memory: %s", member.id, error)

    def _since(self, member: Member) -> float:
        return max(member.usage.last, member.record.leased_now or 0.0)

    def _timeout(self, member: Member) -> float:
        if member.record.state is State.ERROR and self._on_idle(member) != "end":
            return self._core.rules.paused_timeout  # it would sleep, were its engine able to
        own = member.record.idle_timeout_s
        return self._core.rules.idle_timeout if own is None else own

    def _on_idle(self, member: Member) -> OnIdle:
        wanted = member.record.on_idle or self._core.rules.on_idle
        return wanted if can_pause(self._core, member) else "end"

    def _is_idle(self, member: Member) -> bool:
        if not member.free or member.record.state not in _ENDS_IDLE or member.usage.active:
            return False
        return self._core.clock.now() >= self._since(member) + self._timeout(member)

    def _end_asleep(self, member: Member) -> float:
        since = max(member.paused_since, member.usage.last, member.record.leased_now or 0.0)
        return since + self._core.rules.paused_timeout

    def _disk(self, member: Member) -> float:
        seconds = self._core.rules.disk_timeout
        if seconds is None or member.on_disk or member.stays_in_memory or not self._has_disk(member):
            return math.inf
        return member.paused_since + seconds

    def _has_disk(self, member: Member) -> bool:
        engine = self._core.engine_of(member)
        return isinstance(engine, Checkpointing) and Capability.CHECKPOINTS in engine.capabilities

    async def _is_silent(self, member: Member) -> bool:
        """Whether nothing goes on inside. To know that one has to look twice; what did not run at all is silent."""
        if member.record.state is not State.RUNNING:
            return True
        async with self._looks:
            before, seen = member.background, await self._core.health.background(member)
        member.background = seen
        if seen is None:
            return True
        if before is not None and before.at < self._since(member):
            before = None
        if before is None:
            # Two looks right after another would take a moment's rest for idleness.
            member.look_again = seen.at + max(_SOON_S, self._timeout(member) / 4)
            return not seen.running
        if _is_busy(before, seen, _busy_share(member)):
            member.usage.touch()
        return True


def _busy_share(member: Member) -> float:
    record = member.record
    isolation = record.details.get("isolation") or record.spec.isolation or "namespaces"
    return _BUSY_SHARE if isolation == "namespaces" else _BUSY_SHARE_VIRTUAL


def _is_busy(before: Background, seen: Background, share: float) -> bool:
    if seen.output_bytes != before.output_bytes or seen.sent_bytes > before.sent_bytes:
        return True
    return seen.cpu_s - before.cpu_after_s > max(_BUSY_LEAST_S, share * (seen.at - before.at))


def can_pause(core: Core, member: Member) -> bool:
    engine = core.engine_of(member)
    return Capability.PAUSE in engine.capabilities and isinstance(engine, Pausable)
