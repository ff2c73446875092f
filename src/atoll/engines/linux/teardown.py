"""Ends sandboxes, and finds out why they ended. Everything is found by the sandbox id, so this also works on what
another process left half made."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from atoll import workers
from atoll.engines.host import process_ref
from atoll.engines.host.sandbox_record import Ended
from atoll.engines.linux.layout import STARTING, SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.states.state_storage import StateStorage
from atoll.engines.linux.states.steps import Steps
from atoll.errors import EngineError
from atoll.model import Cause
from atoll.waiting import Deadline

_log = logging.getLogger(__name__)
_INTERRUPT_S = 0.2
_TRIES, _RETRY_S = 100, 0.02


class Teardown:
    def __init__(self, layout: SandboxLayout, storage: StateStorage, steps: Steps) -> None:
        self._layout = layout
        self._storage = storage
        self._steps = steps

    async def erase(self, sandbox_id: str, deadline: Deadline) -> None:
        """Kill the sandbox and remove every trace of it, the record last. Other operations in progress on it are given
        up. May be repeated, also concurrently."""
        if not self._layout.records.exists(sandbox_id):
            return

        async def interrupt() -> None:
            await self._interrupt(sandbox_id)

        async with self._layout.exclusion.deleting(sandbox_id, deadline, interrupt) as mine:
            if mine:
                await self.erase_held(sandbox_id, deadline)

    async def erase_held(self, sandbox_id: str, deadline: Deadline) -> None:
        """Do the same as `erase`. The caller must hold the lock of the sandbox."""
        layout = self._layout
        await self._kill(sandbox_id, layout.records.read(sandbox_id), deadline)
        await layout.group(sandbox_id).erase(deadline)
        await layout.images.release(sandbox_id)
        await workers.run(workers.ENGINE, self._remove, sandbox_id)

    async def stop(self, sandbox_id: str, record: Record, deadline: Deadline) -> None:
        """Kill the sandbox and remove everything that it needs only to run. Its layer, image and record stay."""
        await self._kill(sandbox_id, record, deadline)
        await self._layout.group(sandbox_id).erase(deadline)
        await workers.run(workers.ENGINE, self._remove_running_parts, sandbox_id)

    async def expire(self, record: Record) -> Record:
        """End a sandbox whose lifetime is over, and record the cause. The caller must hold the lock of the sandbox."""
        ended = Ended(cause=Cause.TIMEOUT, reason=f"its lifetime of {record.spec.limits.lifetime_s:g} s was over")
        record = record.model_copy(update={"ended": ended})
        self._remember(record)
        await self._kill(record.sandbox_id, record, Deadline.after(10))
        return record

    def explain(self, record: Record) -> Ended | None:
        """Find out from the kernel why a sandbox ended that no longer runs.

        The cause is recorded, unless another process is working on the sandbox. Returns None if the sandbox has a
        different record by now.
        """
        ended = self._explain(record)
        with self._layout.exclusion.at_once(record.sandbox_id) as mine:
            if self._layout.records.read(record.sandbox_id) != record:
                return None
            if mine:
                self._remember(record.model_copy(update={"ended": ended}))
        return ended

    async def collect(self, deadline: Deadline) -> list[str]:
        """Remove sandboxes whose maker died before they ran, and leftovers that belong to no sandbox.

        At the deadline the rest is left to the next call. Returns what was removed.
        """
        layout = self._layout
        removed: list[str] = []
        for sandbox_id in await workers.run(workers.ENGINE, self._abandoned):
            if not deadline.left():
                return removed
            with _beside_the_rest(sandbox_id), layout.exclusion.at_once(sandbox_id) as mine:
                # Another process may have begun to complete or delete it since the list was made.
                if (mine or not layout.records.home(sandbox_id).exists()) and self._is_abandoned(sandbox_id):
                    await self.erase_held(sandbox_id, deadline)
                    removed.append(f"sandbox {sandbox_id}")
        for sandbox_id in await workers.run(workers.ENGINE, self._strays):
            if not deadline.left():
                return removed
            with _beside_the_rest(sandbox_id):
                if not layout.records.exists(sandbox_id):
                    await self.erase_held(sandbox_id, deadline)
                    removed.append(f"leftovers of {sandbox_id}")
        removed += await workers.run(workers.ENGINE, self._steps.collect)
        removed += await workers.run(workers.ENGINE, self._storage.collect)
        await workers.run(workers.ENGINE, layout.sweep)
        await workers.run(workers.ENGINE, layout.remove_empty_groups)
        return removed

    async def collect_shared(self) -> list[str]:
        """Release what sandboxes share and none uses. Return what was removed."""
        removed = ["the network gateway"] if await workers.run(workers.ENGINE, self._layout.gateway.collect) else []
        claimed = await workers.run(workers.ENGINE, self._layout.collect_claims)
        removed += [f"{what} of an installation that is gone" for what in claimed]
        await workers.run(workers.ENGINE, self._layout.close)
        return removed

    # --- its parts -------------------------------------------------------------------------------------------------

    async def _interrupt(self, sandbox_id: str) -> None:
        """Make operations in progress on the sandbox fail, by killing its processes and those that are starting it."""
        for group in (self._layout.starting(sandbox_id), self._layout.group(sandbox_id)):
            with contextlib.suppress(EngineError, OSError):
                await group.kill(Deadline.after(_INTERRUPT_S))

    def _abandoned(self) -> list[str]:
        return [sandbox_id for sandbox_id in self._layout.records.ids() if self._is_abandoned(sandbox_id)]

    def _is_abandoned(self, sandbox_id: str) -> bool:
        """Return whether the maker of the sandbox died before it ran, or the process that was deleting it died."""
        record = self._layout.records.read(sandbox_id)
        return record is None or record.was_never_made() or self._layout.exclusion.is_being_deleted(sandbox_id)

    async def _kill(self, sandbox_id: str, record: Record | None, deadline: Deadline) -> None:
        starting, group = self._layout.starting(sandbox_id), self._layout.group(sandbox_id)
        await starting.erase(deadline)
        if record is not None and record.init is not None and record.is_of_this_boot():
            # The kernel kills all other processes of a PID namespace before it reports the end of the first one.
            ending = asyncio.ensure_future(process_ref.kill({record.init}, deadline))
            await asyncio.sleep(0)
            group.thaw()
            if not await ending:
                raise EngineError(f"processes of sandbox '{sandbox_id}' do not end", hint="Delete it again later.")
        await group.kill(deadline)

    def _remove(self, sandbox_id: str) -> None:
        self._remove_running_parts(sandbox_id)
        record = self._layout.records.read(sandbox_id)
        try:
            if record is not None:
                for volume in record.spec.named_volumes:
                    self._layout.volumes.release(record.spec.owner, volume.name, sandbox_id)
            self._layout.forget_network(sandbox_id)
            self._layout.layers.delete_layer(sandbox_id)
            self._storage.delete_all(sandbox_id)
            self._layout.records.forget(sandbox_id)
            self._layout.forget_group(sandbox_id)
        except OSError as error:
            raise EngineError(f"files of sandbox '{sandbox_id}' cannot be removed: {error}") from error

    def _remove_running_parts(self, sandbox_id: str) -> None:
        try:
            # These files were made by Atoll and the OCI runtime, never by the sandbox.
            _remove_tree(self._layout.run(sandbox_id))
            self._layout.gateway.detach(sandbox_id)
            self._layout.ids.release_all(sandbox_id)
        except OSError as error:
            raise EngineError(f"files of sandbox '{sandbox_id}' cannot be removed: {error}") from error

    def _strays(self) -> list[str]:
        """Return the sandbox ids of which something exists but no record."""
        layout = self._layout
        found = set(layout.layers.list()) | set(layout.ids.owners().values())
        with contextlib.suppress(OSError):
            found |= {name for name in os.listdir(layout.run("x").parent) if not name.startswith(".")}
        found |= {name.removeprefix(STARTING) for name in layout.accounts.names()}
        return sorted(found - set(layout.records.ids()) - {""})

    def _remember(self, record: Record) -> None:
        # Writing fails when the disk is full. The cause is then found out again later, less exactly.
        with contextlib.suppress(OSError):
            self._layout.records.write(record)

    def _explain(self, record: Record) -> Ended:
        if not record.is_of_this_boot():
            return Ended(cause=Cause.HOST, reason="the machine was restarted")
        if record.init is None:
            return Ended(cause=Cause.LOST, reason="the process that was making it died")
        events, limits = self._layout.group(record.sandbox_id).events(), record.limits
        if events.oom_kills and limits.memory_bytes is not None:
            return Ended(cause=Cause.OUT_OF_MEMORY, reason=f"its memory of {limits.memory_bytes} bytes was used up")
        if events.pids_refused:
            limit = "its limit of processes" if limits.pids is None else f"its limit of {limits.pids} processes"
            return Ended(cause=Cause.PIDS, reason=f"{limit} was reached")
        if limits.disk_bytes is not None and self._layout.layers.is_full(record.sandbox_id):
            return Ended(cause=Cause.DISK_FULL, reason=f"its disk of {limits.disk_bytes} bytes was full")
        return Ended(cause=Cause.LOST, reason="its first process ended")


@contextlib.contextmanager
def _beside_the_rest(sandbox_id: str) -> Iterator[None]:
    """Log errors of a removal and go on, so that one thing that cannot be removed does not keep others from it. The
    next collection tries again."""
    try:
        yield
    except (EngineError, OSError) as error:
        _log.warning(
            "what is left of sandbox %s cannot be removed: %s", sandbox_id, error, extra={"sandbox_id": sandbox_id}
        )


def _remove_tree(path: Path) -> None:
    """Remove a directory tree, and retry while an OCI runtime writes files into it.

    That happens if the runtime was called just now to connect to the sandbox. It finds no sandbox any more, and ends.
    """
    for tries_left in range(_TRIES - 1, -1, -1):
        try:
            return shutil.rmtree(path)
        except FileNotFoundError:
            if not path.exists():
                return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not tries_left:
                raise
        time.sleep(_RETRY_S)
