"""Delete sandboxes. A deletion is written down first, runs in a task of the manager, and is retried until it
succeeds."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from atoll.errors import EngineError, SandboxError, StateError
from atoll.manager.context import ManagerContext
from atoll.manager.members import Member
from atoll.manager.record import Operation
from atoll.manager.schedule import Schedule
from atoll.manager.tasks import outcome
from atoll.model import Cause, State
from atoll.tracing import span

FIRST_RETRY_S = 1.0
_MAX_RETRY_S = 300.0
_PATIENCE_S = 2.0
_log = logging.getLogger(__name__)


class Deleter:
    def __init__(self, context: ManagerContext, schedule: Schedule) -> None:
        self._context = context
        self._schedule = schedule

    async def delete(self, member: Member, cause: Cause, reason: str) -> None:
        """Delete the sandbox and return when nothing is left. Cancelling the caller does not stop it. Raises the
        engine's error."""
        await outcome(self.begin(member, cause, reason))

    def begin(self, member: Member, cause: Cause, reason: str) -> asyncio.Task[None]:
        """Start to delete the sandbox. From now on nobody can get it. The task ends when nothing is left, or fails;
        repeated calls share one task."""
        if member.deletion is None:
            member.is_being_deleted = True
            member.deletion_reason = member.deletion_reason or reason
            work = self._end(member, cause, member.deletion_reason)
            member.deletion = self._context.tasks.spawn(work, f"delete {member.id}")
        return member.deletion

    async def _end(self, member: Member, cause: Cause, reason: str) -> None:
        with span("manager.delete_sandbox", sandbox_id=member.id, cause=cause):
            await self._end_alone(member, cause, reason)

    async def _end_alone(self, member: Member, cause: Cause, reason: str) -> None:
        try:
            if member.creation is not None:
                member.creation.task.cancel()
                await asyncio.wait({member.creation.task})
            while member.record.act in (Operation.PAUSE, Operation.RESUME):
                if not await member.changes_within(_PATIENCE_S):
                    await self._interrupt(member)
            if self._context.members.find(member.id) is not member:
                return  # its creation was not finished and has been undone
            await self._destroy(member, cause, reason)
        finally:
            member.deletion = None
            if member.tries:
                self._schedule.hurry()

    async def _interrupt(self, member: Member) -> None:
        """Make the engine give up an operation that takes long, by asking it to delete the sandbox. The regular
        deletion follows afterwards."""
        work = self._context.engine_of(member).delete(member.record.handle())
        with suppress(SandboxError, OSError):
            await self._context.tasks.bounded(work, self._context.rules.delete_s, f"interrupt {member.id}")

    async def _destroy(self, member: Member, cause: Cause, reason: str) -> None:
        context, record = self._context, member.record
        # Even if the disk is full and this cannot be written, the sandbox can be deleted; the next start finds it gone.
        await self._written(context.transitions.change(member, act=Operation.DELETE, cause=cause, reason=reason))
        await member.sandbox.let_go()
        try:
            work = context.engine_of(member).delete(record.handle())
            await context.tasks.bounded(work, context.rules.delete_s, f"delete {member.id}")
        except Exception as error:
            context.metrics.failures["delete"] += 1
            member.tries += 1
            member.next_try = context.clock.now() + min(_MAX_RETRY_S, FIRST_RETRY_S * 2 ** (member.tries - 1))
            why = f"it cannot be deleted: {error}"
            await self._written(
                context.transitions.change(member, State.ERROR, act=Operation.DELETE, cause=cause, reason=why)
            )
            if isinstance(error, SandboxError):
                raise
            raise EngineError(f"sandbox {member.id} cannot be deleted: {error!r}") from error
        if record.state not in (State.STOPPED, State.STARTING):  # else its end was counted, or it never ran
            context.metrics.deaths[cause] += 1
        await self._written(context.transitions.end(member, cause, reason))

    async def _written(self, writing: asyncio.Future[None]) -> None:
        try:
            await writing
        except StateError as error:
            self._context.metrics.failures["write"] += 1
            _log.error("%s", error)
