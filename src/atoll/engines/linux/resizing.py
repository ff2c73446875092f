"""Changes limits of an existing sandbox: all that are named, or none.

The record is written first, with the former limits beside the new ones. If this process dies before the change is
complete, the next observer of the sandbox completes it, or undoes it where the sandbox uses more by then.
"""

from __future__ import annotations

import errno
from contextlib import suppress

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.enforcement import given_limits
from atoll.engines.host.cgroups.group_limits import CgroupLimits
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.states.checkpoints import Checkpoints
from atoll.errors import EngineError, SandboxError, SandboxResourceError, UnsupportedError
from atoll.model import Limits


class Resizing:
    def __init__(self, layout: SandboxLayout, checkpoints: Checkpoints) -> None:
        self._layout = layout
        self._checkpoints = checkpoints

    async def change(self, record: Record, limits: Limits) -> Record:
        """Change the limits that are named. Returns the record, which has been written. The caller must hold the lock
        of the sandbox."""
        before = record.spec.limits
        changed = _with_limits(record, before.model_copy(update=given_limits(limits)), before)
        self._layout.records.write(changed)
        try:
            await workers.run(workers.ENGINE, self._apply, record, changed)
        except BaseException:
            self._layout.records.write(record)
            raise
        return self._written(changed)

    async def completed(self, record: Record) -> Record:
        """Complete a change whose process died. Return the record, unchanged if another process is at work on the
        sandbox."""
        sandbox_id = record.sandbox_id
        with self._layout.exclusion.at_once(sandbox_id) as mine:
            record = self._layout.records.read(sandbox_id) or record
            if not mine or record.limits_before is None or self._layout.exclusion.is_being_deleted(sandbox_id):
                return record
            return await finish(self._complete(record, record.limits_before))

    async def _complete(self, record: Record, before: Limits) -> Record:
        former = _with_limits(record, before, None)
        try:
            await workers.run(workers.ENGINE, self._apply, former, record)
        except SandboxError:
            await workers.run(workers.ENGINE, self._undo, former, record)
            return self._written(former)
        return self._written(record)

    def _undo(self, former: Record, changed: Record) -> None:
        with suppress(OSError, SandboxError):
            self._put(changed, former)

    def _written(self, record: Record) -> Record:
        done = record.model_copy(update={"limits_before": None})
        self._layout.records.write(done)
        return done

    def _apply(self, old: Record, new: Record) -> None:
        """Put the limits of `new` in force, or leave those of `old`."""
        self._refuse_too_little(old, new)
        try:
            self._put(old, new)
        except (OSError, SandboxError) as error:
            self._undo(old, new)
            if isinstance(error, OSError) and error.errno == errno.EBUSY:
                raise _too_little("memory", new.limits.memory_bytes) from error
            raise EngineError(f"the limits of sandbox '{new.sandbox_id}' cannot be set: {error}") from error

    def _put(self, old: Record, new: Record) -> None:
        if old.limits.disk_bytes != new.limits.disk_bytes:
            self._checkpoints.set_limit(new)
        self._layout.group(new.sandbox_id).change(CgroupLimits.of(old.limits), CgroupLimits.of(new.limits))

    def _refuse_too_little(self, old: Record, new: Record) -> None:
        """Raise SandboxResourceError for a limit below what the sandbox uses now. The kernel would kill its processes,
        or let it start no other."""
        group, layers = self._layout.group(new.sandbox_id), self._layout.layers
        disk = layers.account_usage(new.sandbox_id) if old.limits.disk_bytes != new.limits.disk_bytes else 0
        if disk is None:
            raise UnsupportedError(
                f"sandbox '{new.sandbox_id}' was made without a disk limit and cannot get one while it runs",
                hint="Make a new sandbox with a disk limit.",
            )
        for name, words, used in (
            ("memory_bytes", "memory", group.memory_in_use()),
            ("pids", "processes", group.stats().pids),
            ("disk_bytes", "disk", disk + old.origin_bytes),
        ):
            wanted = getattr(new.limits, name)
            if wanted != getattr(old.limits, name) and wanted is not None and used is not None and used > wanted:
                raise _too_little(words, wanted, used)


def _too_little(words: str, wanted: int | None, used: int | None = None) -> SandboxResourceError:
    unit = "" if words == "processes" else " bytes"
    much = f"{used:,}{unit} of {words}" if used is not None else f"more {words}"
    return SandboxResourceError(
        f"the sandbox uses {much}, more than the new limit of {wanted or 0:,}{unit}",
        hint="End some of its processes or delete files first, or choose a higher limit.",
    )


def _with_limits(record: Record, limits: Limits, before: Limits | None) -> Record:
    spec = record.spec.model_copy(update={"limits": limits})
    return record.model_copy(update={"spec": spec, "limits_before": before})
