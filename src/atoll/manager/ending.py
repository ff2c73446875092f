"""How a member ends. Written down first, done by a task of the manager's own, and tried again until it is done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from atoll.errors import EngineError, SandboxError, StateError
from atoll.manager.core import Core
from atoll.manager.members import Member
from atoll.manager.record import Act
from atoll.manager.tasks import outcome
from atoll.model import Cause, State

FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 300.0
_PATIENCE_S = 2.0
_log = logging.getLogger(__name__)


class Ending:
    def __init__(self, core: Core) -> None:
        self.on_failure: Callable[[], None] = lambda: None
        """Called when one has to be tried again later; set by whoever does that."""
        self._core = core

    async def delete(self, member: Member, cause: Cause, reason: str) -> None:
        """Returns when nothing is left. Cancelling the caller does not stop it. Raises what the engine says."""
        await outcome(self.begin(member, cause, reason))

    def begin(self, member: Member, cause: Cause, reason: str) -> asyncio.Task[None]:
        """From now on nobody gets it. The task ends when nothing is left, or fails; several calls share one."""
        if member.ending is None:
            member.doomed = True
            member.why = member.why or reason
            member.ending = self._core.tasks.spawn(self._end(member, cause, member.why), f"delete {member.id}")
        return member.ending

    async def _end(self, member: Member, cause: Cause, reason: str) -> None:
        try:
            if member.making is not None:
                member.making.task.cancel()
                await asyncio.wait({member.making.task})
            while member.record.act in (Act.PAUSE, Act.RESUME):
                if not await _changes(member, _PATIENCE_S):
                    await self._interrupt(member)
            if self._core.members.find(member.id) is not member:
                return  # it was never finished, and has been undone
            await self._destroy(member, cause, reason)
        finally:
            member.ending = None
            if member.tries:
                self.on_failure()

    async def _interrupt(self, member: Member) -> None:
        """What is being done to it takes long. The engine gives that up for a deletion, which is then done once more,
        in order."""
        work = self._core.engine_of(member).delete(member.record.handle())
        with suppress(SandboxError, OSError):
            await self._core.tasks.bounded(work, self._core.rules.delete_s, f"interrupt {member.id}")

    async def _destroy(self, member: Member, cause: Cause, reason: str) -> None:
        core, record = self._core, member.record
        # Without room to write one can still delete; the next start finds the sandbox gone.
        await _written(core.ledger.change(member, act=Act.DELETE, cause=cause, reason=reason), core)
        await member.sandbox.let_go()
        try:
            await core.tasks.bounded(
                core.engine_of(member).delete(record.handle()), core.rules.delete_s, f"delete {member.id}"
            )
        except Exception as error:
            core.metrics.failures["delete"] += 1
            member.tries += 1
            wait = min(_LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** (member.tries - 1))
            member.next_try = core.clock.now() + wait
            why = f"it cannot be deleted: {error}"
            await _written(core.ledger.change(member, State.ERROR, act=Act.DELETE, cause=cause, reason=why), core)
            if isinstance(error, SandboxError):
                raise
            raise EngineError(f"sandbox {member.id} cannot be deleted: {error!r}") from error
        if record.state not in (State.STOPPED, State.STARTING):  # else its death was counted, or it never lived
            core.metrics.deaths[cause] += 1
        await _written(core.ledger.end(member, cause, reason), core)


async def _changes(member: Member, seconds: float) -> bool:
    """Wait for a change of its record. False: there was none in that time."""
    try:
        async with asyncio.timeout(seconds):
            await member.changed()
    except TimeoutError:
        return False
    return True


async def _written(writing: asyncio.Future[None], core: Core) -> None:
    try:
        await writing
    except StateError as error:
        core.metrics.failures["write"] += 1
        _log.error("%s", error)
