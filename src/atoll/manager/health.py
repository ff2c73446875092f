"""Check sandboxes without using them: ask the engine for their state, and their agent over a separate connection."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from atoll.engines.contract import ByteStream
from atoll.errors import SandboxError, SandboxGoneError
from atoll.guest.guest import Guest
from atoll.guest.socket_tables import DEVICE_TABLE, TCP_TABLES, listening, read_table, sent_bytes
from atoll.manager.context import ManagerContext
from atoll.manager.members import Background, Member
from atoll.model import Cause, Observation, State

T = TypeVar("T")
_CONNECT_S = 5.0
_QUIET_PIDS = 2
"""A sandbox in which only the agent runs has this many processes, on every engine."""
_BUSY_SHARE = 0.01
"""A sandbox is busy above this share of one processor, between two checks. A process that only waits uses less."""
_BUSY_SHARE_VIRTUAL = 0.1
"""The same for a kernel in user space, which uses some hundredths of a processor even when nothing runs on it."""
_BUSY_LEAST_S = 0.04
_log = logging.getLogger(__name__)


class Health:
    def __init__(self, context: ManagerContext) -> None:
        self._context = context

    async def look(self, member: Member) -> None:
        """Ask the engine for the sandbox's state and record it. Never raises: if the engine cannot say, the state is
        ERROR."""
        context = self._context
        try:
            work = context.engine_of(member).inspect(member.record.handle())
            seen = await context.tasks.bounded(work, context.rules.inspect_s, f"inspect {member.id}")
        except SandboxError as error:
            context.metrics.failures["inspect"] += 1
            seen = Observation(State.ERROR, None, f"the engine cannot say how it is: {error.reason}")
        if not member.free or context.members.find(member.id) is not member:
            return  # an operation on it began meanwhile, and its outcome decides
        try:
            await self._believe(member, seen)
        except SandboxError as error:
            _log.warning(
                "the new state of sandbox %s could not be recorded: %s",
                member.id,
                error,
                extra={"sandbox_id": member.id},
            )

    async def _believe(self, member: Member, seen: Observation) -> None:
        transitions, before = self._context.transitions, member.record.state
        member.on_disk = seen.on_disk if seen.state is State.PAUSED else member.on_disk
        if seen.state is State.MISSING:
            self._context.metrics.deaths[Cause.LOST] += 1
            await transitions.end(member, Cause.LOST, "it was removed by somebody else")
        elif before is State.STOPPED or seen.state is before:
            return
        elif seen.state is State.STOPPED:
            cause = seen.cause or Cause.LOST
            self._context.metrics.deaths[cause] += 1
            await transitions.change(member, State.STOPPED, cause=cause, reason=seen.reason)
            await member.sandbox.let_go()
        elif seen.state is State.STARTING:
            return  # another caller is starting it again and will record the outcome
        else:
            awake = {"paused_by": None, "paused_at": None} if seen.state is State.RUNNING else {}
            await transitions.change(member, seen.state, cause=seen.cause, reason=seen.reason, update=awake)

    async def ask(self, member: Member, question: Callable[[Guest], Awaitable[T]], seconds: float) -> T:
        """Ask the sandbox's agent a question over a separate connection.

        This is not a use and does not wake a paused sandbox. Raises SandboxGoneError if the sandbox does not run, and
        SandboxTimeoutError if there is no answer in time.
        """

        async def connect() -> ByteStream:
            if not member.usable:
                raise SandboxGoneError(f"sandbox {member.id} is not running")
            return await self._context.engine_of(member).connect(member.record.handle())

        async def answer() -> T:
            guest = Guest(connect, connect_timeout_s=_CONNECT_S)
            member.observers.add(guest)
            try:
                return await question(guest)
            finally:
                member.observers.discard(guest)
                await guest.aclose()

        if not member.usable:
            raise SandboxGoneError(f"sandbox {member.id} is not running")
        return await self._context.tasks.bounded(answer(), seconds, f"ask {member.id}")

    async def background(self, member: Member) -> Background | None:
        """Measure what goes on in the sandbox without a waiting caller. Returns None if that cannot be determined."""
        engine, handle = self._context.engine_of(member), member.record.handle()

        async def figures(guest: Guest) -> Background:
            before = await engine.stats(handle)
            processes, stats = await guest.processes.list(), await guest.stats()
            tables = [await read_table(guest, path) for path in TCP_TABLES if member.record.services]
            used = await engine.stats(handle)
            return Background(
                at=self._context.clock.now(),
                running=any(process.running for process in processes) or (used.pids or 0) > _QUIET_PIDS,
                output_bytes=stats.output_bytes,
                sent_bytes=sent_bytes(await read_table(guest, DEVICE_TABLE)),
                cpu_s=before.cpu_s or 0.0,
                cpu_after_s=used.cpu_s or 0.0,
                listens=frozenset(port for table in tables for port in listening(table)),
            )

        try:
            return await self.ask(member, figures, self._context.rules.inspect_s)
        except (SandboxError, OSError):
            return None


def is_busy(member: Member, before: Background, seen: Background) -> bool:
    """Whether the sandbox used the processor, wrote output or sent data between two checks."""
    if seen.output_bytes != before.output_bytes or seen.sent_bytes > before.sent_bytes:
        return True
    record = member.record
    isolation = record.details.get("isolation") or record.spec.isolation or "namespaces"
    share = _BUSY_SHARE if isolation == "namespaces" else _BUSY_SHARE_VIRTUAL
    return seen.cpu_s - before.cpu_after_s > max(_BUSY_LEAST_S, share * (seen.at - before.at))
