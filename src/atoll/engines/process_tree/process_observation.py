"""The state of a sandbox, according to its record and the kernel."""

from __future__ import annotations

import signal
from contextlib import suppress

from atoll.engines.host import process_ref
from atoll.engines.host.deadline import Deadline
from atoll.engines.host.sandbox_record import Ended
from atoll.engines.process_tree.process_record import Record, Records
from atoll.model import Cause, Observation, State

_SIGNAL_BASE = 128
"""A shell, and bubblewrap, report death by signal n as this plus n."""


async def observe(records: Records, sandbox_id: str) -> Observation:
    record = records.read(sandbox_id)
    if record is None:
        if records.exists(sandbox_id):
            return Observation(State.STOPPED, Cause.LOST, "its record is missing or damaged")
        return Observation(State.MISSING, Cause.USER, "it was deleted or never existed")
    if record.ended is None and record.is_of_this_boot():
        if record.init is None and record.creator.is_alive():
            return Observation(State.STARTING)
        if record.init is not None and record.init.is_alive():
            return Observation(State.RUNNING)
    ended = record.ended or await _ending(record)
    if record.ended is None:
        _remember(records, record, ended)
    return Observation(State.STOPPED, ended.cause, ended.reason)


async def _ending(record: Record) -> Ended:
    if not record.is_of_this_boot():
        return Ended(cause=Cause.HOST, reason="the machine was restarted")
    if record.monitor is None:
        return Ended(cause=Cause.LOST, reason="the process that was making it died")
    # The monitor is a child of this process. It reports how the process inside ended, a moment later.
    await process_ref.wait({record.monitor}, Deadline.after(1))
    status = process_ref.reap(record.monitor.pid)
    if status is None:
        return Ended(cause=Cause.LOST, reason="its agent ended while nobody was watching")
    number = -status if status < 0 else status - _SIGNAL_BASE
    if number > 0:
        return Ended(cause=Cause.KILLED, reason=f"its agent was killed by {_signal_name(number)}")
    return Ended(cause=Cause.LOST, reason=f"its agent ended with exit status {status}")


def _remember(records: Records, record: Record, ended: Ended) -> None:
    """Write down how a sandbox ended, which cannot be found out a second time."""
    # This fails if the sandbox is being deleted or the disk is full. Then it is found out again, less exactly.
    with suppress(OSError):
        records.write(record.model_copy(update={"ended": ended}))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
