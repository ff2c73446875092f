"""Health checks of new sandboxes: a sandbox is STARTING until it answers, and in ERROR if it does not answer in time.

A check is one short HTTP request to a port inside, of which only the status line is read. It is not a use of the
sandbox. Few checks run at a time, and fewer of one user, so sandboxes that answer slowly or never delay no other
user's. After the grace period checks continue ever more rarely, and a sandbox that answers late is RUNNING after all.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time

from atoll import buffers, tracing
from atoll.errors import SandboxError
from atoll.guest.readiness import CHECK_S, asked, refusal
from atoll.manager import Record, SandboxManager
from atoll.model import State
from atoll.model.state import STATUS_OF, SandboxStatus
from atoll.service.models.exposed_port import HealthCheck
from atoll.waiting import EventSignal, happens_within
from atoll.workers import Shares

HEALTH_LABEL = "sandbox_health_check"
_RESULT_LABEL = "sandbox_health_result"
HEALTH_LABELS = (HEALTH_LABEL, _RESULT_LABEL)
HEALTH = "health"
"""The kind of events about health checks."""
_HEALTHY = "healthy"
_FIRST_PAUSE_S, _PAUSE_S, _LATE_PAUSE_S = 0.1, 1.0, 30.0
_GIVE_UP_S = 3600.0
_AT_ONCE, _OF_ONE = 8, 2
_MAX_SAID = 300
_log = logging.getLogger(__name__)


def label_of(check: HealthCheck, port: int) -> dict[str, str]:
    return {HEALTH_LABEL: f"{port} {check.grace_s!r} {check.path}"}


def status_of(record: Record) -> tuple[SandboxStatus, str]:
    """Return the status that users see, and the reason if it is an error."""
    status = STATUS_OF[record.state]
    if status is not SandboxStatus.RUNNING or not record.labels.get(HEALTH_LABEL):
        return status, record.reason
    result = record.labels.get(_RESULT_LABEL)
    if record.command_end is not None:
        return SandboxStatus.ERROR, record.command_end.reason
    if result is None:
        return SandboxStatus.STARTING, record.reason
    return (status, record.reason) if result == _HEALTHY else (SandboxStatus.ERROR, result)


def is_waited_for(record: Record) -> bool:
    return bool(record.labels.get(HEALTH_LABEL)) and record.labels.get(_RESULT_LABEL) != _HEALTHY


class Startups:
    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._slots = Shares(_AT_ONCE, _OF_ONE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = EventSignal()

    async def go_on(self) -> None:
        """Continue the checks that an earlier server began."""
        for record in await self._manager.list_sandboxes():
            if is_waited_for(record):
                self.begin(record.id)

    def begin(self, sandbox_id: str) -> None:
        """Check the sandbox until it answers. May be repeated."""
        if sandbox_id not in self._tasks:
            with tracing.apart():
                task = asyncio.create_task(self._watch(sandbox_id), name=f"health of {sandbox_id}")
            self._tasks[sandbox_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(sandbox_id, None))

    async def changed(self, seconds: float) -> None:
        """Return when a check of any sandbox had a result, or after this many seconds."""
        await happens_within(self._changed.next, seconds)

    async def aclose(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, sandbox_id: str) -> None:
        buffers.reservation.set(None)  # the request that started this task ends soon, and its memory is released
        try:
            await self._until_healthy(sandbox_id)
        except SandboxError as error:
            _log.debug(
                "the health of sandbox %s is not checked any more: %s",
                sandbox_id,
                error,
                extra={"sandbox_id": sandbox_id},
            )

    async def _until_healthy(self, sandbox_id: str) -> None:
        pause_s, deadline = _FIRST_PAUSE_S, None
        while (record := await self._manager.recall(sandbox_id)) is not None and record.state is not State.STOPPED:
            port, grace_s, path = _parse(record.labels.get(HEALTH_LABEL, ""))
            if record.command_end is not None:
                await self._decide(record, record.command_end.reason)
                return
            if record.state is not State.RUNNING:
                deadline = None  # time while it is paused does not count
            else:
                deadline = time.monotonic() + grace_s if deadline is None else deadline
                failure = await self._check(record, port, path)
                if failure is None:
                    await self._decide(record, _HEALTHY)
                    return
                late_s = time.monotonic() - deadline
                if late_s >= 0 and failure:
                    await self._decide(record, f"{path} on port {port} was not healthy within {grace_s:g} s: {failure}")
                if late_s > _GIVE_UP_S:
                    return
            is_late = deadline is not None and time.monotonic() >= deadline
            pause_s = min(2 * pause_s, _LATE_PAUSE_S if is_late else _PAUSE_S)
            await asyncio.sleep(pause_s if is_late or deadline is None else min(pause_s, deadline - time.monotonic()))

    async def _check(self, record: Record, port: int, path: str) -> str | None:
        """Return None if the sandbox is healthy, otherwise why it is not, or an empty text if that is unknown."""
        async with self._slots.slot(record.owner or ""):
            try:
                return refusal(await self._manager.observe(record.id, lambda guest: asked(guest, port, path), CHECK_S))
            except (OSError, SandboxError) as error:
                return refusal(error)

    async def _decide(self, record: Record, result: str) -> None:
        """Store and report the result if it differs from the last one."""
        before = record.labels.get(_RESULT_LABEL)
        if before is None or (before == _HEALTHY) != (result == _HEALTHY):
            labels = {_RESULT_LABEL: result[:_MAX_SAID]}
            await self._manager.update(record.id, lambda now: {"labels": {**now.labels, **labels}})
            status = SandboxStatus.RUNNING if result == _HEALTHY else SandboxStatus.ERROR
            reason = "its health check succeeded" if result == _HEALTHY else result
            await self._manager.report(record.id, HEALTH, [(reason, json.dumps({"status": status}))])
        self._changed.notify()


def _parse(label: str) -> tuple[int, float, str]:
    port, grace_s, path = label.split(" ", 2)
    return int(port), float(grace_s), path
