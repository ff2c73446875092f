"""Finds out the state of a sandbox from its record and from the kernel.

Observing also has effects: it completes an operation on the sandbox whose process died, records an end that was not
recorded yet, and ends a sandbox whose lifetime is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atoll.cancellation import finish
from atoll.engines.host import exclusion, process_ref
from atoll.engines.linux.launcher import Launchers
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.resizing import Resizing
from atoll.engines.linux.restoration import Restoration
from atoll.engines.linux.standstill import Standstill
from atoll.engines.linux.teardown import Teardown
from atoll.errors import EngineError, SandboxGoneError
from atoll.model import Cause, Observation, State
from atoll.waiting import Deadline

_RESUME_S = 10.0
_DYING_S = 2.0


class Observer:
    def __init__(
        self,
        layout: SandboxLayout,
        launchers: Launchers,
        standstill: Standstill,
        restoration: Restoration,
        resizing: Resizing,
        teardown: Teardown,
    ) -> None:
        self._layout = layout
        self._launchers = launchers
        self._standstill = standstill
        self._restoration = restoration
        self._resizing = resizing
        self._teardown = teardown

    async def observe(self, sandbox_id: str) -> Observation:
        layout = self._layout
        while True:
            record = layout.records.read(sandbox_id)
            if layout.exclusion.is_being_deleted(sandbox_id):
                return Observation(State.STOPPED, Cause.USER, "it is being deleted")
            if record is None:
                if layout.records.exists(sandbox_id):
                    return Observation(State.STOPPED, Cause.LOST, "its record is missing or damaged")
                return Observation(State.MISSING, Cause.USER, "it has been deleted or never existed")
            if record.asleep and record.ended is None:
                return Observation(State.PAUSED, None, "its memory is on the disk", on_disk=True)
            record = await self._restoration.completed(record)
            if record.ended is None and (record.restoring is not None or record.is_being_made()):
                return Observation(State.STARTING)
            if record.is_alive():
                return await self._observe_living(record)
            ended = record.ended or self._teardown.explain(record)
            if ended is not None:  # otherwise it was started again after its record was read
                return Observation(State.STOPPED, ended.cause, ended.reason)

    async def _observe_living(self, record: Record) -> Observation:
        sandbox_id = record.sandbox_id
        if record.limits_before is not None:
            await self._resizing.completed(record)
        if record.left_s() <= 0:
            with self._layout.exclusion.at_once(sandbox_id) as mine:
                if mine and (ended := (await self._teardown.expire(record)).ended) is not None:
                    return Observation(State.STOPPED, ended.cause, ended.reason)
        if self._standstill.is_abandoned(sandbox_id):
            await self._end_standstill(record)
        paused = self._launchers.named(record.runtime).is_paused(sandbox_id)
        return Observation(State.PAUSED if paused and not self._standstill.is_held(sandbox_id) else State.RUNNING)

    async def _end_standstill(self, record: Record) -> None:
        """Let a sandbox go on that was stopped for saving by a process that has died."""
        sandbox_id = record.sandbox_id
        async with self._layout.exclusion.alone(sandbox_id):
            if self._standstill.is_abandoned(sandbox_id):
                launcher = self._launchers.named(record.runtime)
                await finish(self._standstill.end(sandbox_id, launcher, Deadline.after(_RESUME_S)))

    async def need_existing(self, sandbox_id: str) -> None:
        """Raise SandboxGoneError with the cause if the sandbox has ended."""
        seen = await self.observe(sandbox_id)
        if seen.state in (State.STOPPED, State.MISSING):
            cause = seen.cause.value if seen.cause else "unknown"
            raise SandboxGoneError(f"sandbox '{sandbox_id}' has ended: {seen.reason}", cause=cause)

    def record(self, sandbox_id: str, *, living: bool = False) -> Record:
        """Return the record of a sandbox. Raises SandboxGoneError if it was deleted or never finished.

        With `living`, for callers that hold the lock and need its processes, it is raised for an ended sandbox too.
        """
        record = self._layout.records.read(sandbox_id)
        if record is None:
            raise exclusion.deleted(sandbox_id)
        if record.was_never_made():
            raise SandboxGoneError(
                f"sandbox '{sandbox_id}' was never finished: the process that was making it died",
                cause=Cause.LOST.value,
            )
        if living and not record.is_alive():
            raise SandboxGoneError(f"sandbox '{sandbox_id}' has just ended", cause=Cause.LOST.value)
        return record

    async def settle(self, sandbox_id: str, *, memory: bool = False) -> None:
        """Complete an operation on the sandbox whose process died.

        Raises SandboxGoneError if the sandbox was deleted or, with `memory`, if it has ended.
        """
        record = self.record(sandbox_id)
        if record.restoring is not None:
            await self._restoration.completed(record)
        if memory:
            await self.need_existing(sandbox_id)

    @asynccontextmanager
    async def explaining_end(self, record: Record) -> AsyncIterator[None]:
        """Turn an EngineError of a launcher into SandboxGoneError if its cause is that the sandbox is just ending."""
        try:
            yield
        except EngineError as error:
            self._layout.exclusion.refuse_deleted(record.sandbox_id)
            if record.init is None or await process_ref.wait({record.init}, Deadline.after(_DYING_S)):
                gone = f"sandbox '{record.sandbox_id}' has just ended"
                raise SandboxGoneError(gone, cause=Cause.LOST.value) from error
            raise
