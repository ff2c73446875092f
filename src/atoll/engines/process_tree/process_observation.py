"""The state of a sandbox, according to its record and the kernel."""

from __future__ import annotations

import signal
from contextlib import suppress

from atoll.engines.host import process_ref
from atoll.engines.host.sandbox_record import Ended
from atoll.engines.process_tree.process_record import Record, Records
from atoll.model import Cause, Observation, State
from atoll.waiting import Deadline

_LIFETIME_OVER = 75
_DYING_S = 5.0
_SIGNAL_BASE = 128
"""A shell, and bubblewrap, report death by signal n as this plus n."""


async def observe(records: Records, sandbox_id: str) -> Observation:
    record = records.read(sandbox_id)
    if record is None:
        if records.exists(sandbox_id):
            return Observation(State.STOPPED, Cause.LOST, "its record is missing or damaged")
        return Observation(State.MISSING, Cause.USER, "it was deleted or never existed")
    over = False
    if record.ended is None and record.is_of_this_boot():
        if record.init is None and record.creator.is_alive():
            return Observation(State.STARTING)
        if record.init is not None and record.init.is_alive():
            if not record.is_over_age():
                return Observation(State.RUNNING)
            over = await process_ref.kill({record.init}, Deadline.after(_DYING_S))  # a paused agent does not end
    ended = record.ended or await _ending(record, over)
    if record.ended is None:
        _remember(records, record, ended)
    return Observation(State.STOPPED, ended.cause, ended.reason)


async def _ending(record: Record, over: bool) -> Ended:
    if not record.is_of_this_boot():
        return Ended(cause=Cause.HOST, reason="the machine was restarted")
    if record.monitor is None:
        return Ended(cause=Cause.LOST, reason="the process that was making it died")
    # The monitor is a child of this process. It reports how the process inside ended, a moment later.
    await process_ref.wait({record.monitor}, Deadline.after(1))
    status = process_ref.reap(record.monitor.pid)
    # Code inside cannot make the first process exit with this status.
    if over or status == _LIFETIME_OVER or (status is None and record.is_over_age()):
        return Ended(cause=Cause.TIMEOUT, reason=f"its lifetime of {record.spec.limits.lifetime_s:g} s was over")
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
