"""What the engine sees of a member becomes what the manager knows."""

from __future__ import annotations

import logging

from atoll.errors import SandboxError
from atoll.guest import connections
from atoll.guest.guest import Guest
from atoll.manager.core import Core
from atoll.manager.members import Background, Member
from atoll.model import Cause, Observation, State

_QUIET_PIDS = 2
"""So many processes has a sandbox in which nothing runs but its agent, on every engine."""
_log = logging.getLogger(__name__)


class Health:
    def __init__(self, core: Core) -> None:
        self._core = core

    async def look(self, member: Member) -> None:
        """Ask the engine, and believe it. Never raises: an engine that cannot say makes the state ERROR."""
        try:
            work = self._core.engine_of(member).inspect(member.record.handle())
            seen = await self._core.tasks.bounded(work, self._core.rules.inspect_s, f"inspect {member.id}")
        except SandboxError as error:
            self._core.metrics.failures["inspect"] += 1
            seen = Observation(State.ERROR, None, f"the engine cannot say how it is: {error.reason}")
        if not member.free or self._core.members.find(member.id) is not member:
            return  # meanwhile something is being done to it, which decides
        try:
            await self._believe(member, seen)
        except SandboxError as error:
            _log.warning("what became of sandbox %s is not written down: %s", member.id, error)

    async def _believe(self, member: Member, seen: Observation) -> None:
        ledger, before = self._core.ledger, member.record.state
        if seen.state is State.MISSING:
            self._core.metrics.deaths[Cause.LOST] += 1
            await ledger.end(member, Cause.LOST, "it was removed by somebody else")
        elif before is State.STOPPED or seen.state is before:
            return
        elif seen.state is State.STOPPED:
            cause = seen.cause or Cause.LOST
            self._core.metrics.deaths[cause] += 1
            await ledger.change(member, State.STOPPED, cause=cause, reason=seen.reason)
            await member.sandbox.let_go()
        elif seen.state is State.STARTING:
            return  # somebody is just starting it again, and knows best what comes of that
        else:
            awake = {"paused_by": None, "paused_at": None} if seen.state is State.RUNNING else {}
            await ledger.change(member, seen.state, cause=seen.cause, reason=seen.reason, update=awake)

    async def background(self, member: Member) -> Background | None:
        """What goes on in it without us. Asking is not a use. None: it cannot say."""
        core = self._core
        guest = Guest(lambda: self._core.engine_of(member).connect(member.record.handle()), connect_timeout_s=5.0)

        async def ask() -> Background:
            before = await core.engine_of(member).stats(member.record.handle())
            processes, stats = await guest.processes.list(), await guest.stats()
            tables = [await connections.table(guest, path) for path in connections.TABLES if member.record.services]
            used = await core.engine_of(member).stats(member.record.handle())
            return Background(
                at=core.clock.now(),
                running=any(process.running for process in processes) or (used.pids or 0) > _QUIET_PIDS,
                output_bytes=stats.output_bytes,
                sent_bytes=connections.sent_bytes(await connections.table(guest, connections.DEVICES)),
                cpu_s=before.cpu_s or 0.0,
                cpu_after_s=used.cpu_s or 0.0,
                listens=frozenset(port for table in tables for port in connections.listening(table)),
            )

        try:
            return await core.tasks.bounded(ask(), core.rules.inspect_s, f"ask {member.id}")
        except (SandboxError, OSError):
            return None
        finally:
            await guest.aclose()
