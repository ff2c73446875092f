"""The end of a sandbox, and why it ended. Everything is found by the sandbox's name, so it works on what another
process left half made."""

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
from atoll.engines.linux.oci.checkpoints import Checkpoints
from atoll.engines.linux.oci.places import STARTING, Places
from atoll.engines.linux.oci.record import Ended, Record
from atoll.engines.local import processes
from atoll.engines.local.waiting import Deadline
from atoll.errors import EngineError
from atoll.model import Cause

_log = logging.getLogger(__name__)
_INTERRUPT_S = 0.2
_TRIES, _RETRY_S = 100, 0.02


class Ending:
    def __init__(self, places: Places, checkpoints: Checkpoints) -> None:
        self._places = places
        self._checkpoints = checkpoints

    async def erase(self, sandbox_id: str, deadline: Deadline) -> None:
        """Kill it and remove every trace, the record last. May be repeated, and by several at once. Whatever else is
        being done to it is given up."""
        if not self._places.records.exists(sandbox_id):
            return

        async def interrupt() -> None:
            await self._interrupt(sandbox_id)

        async with self._places.exclusion.deleting(sandbox_id, deadline, interrupt) as mine:
            if mine:
                await self.erase_held(sandbox_id, deadline)

    async def erase_held(self, sandbox_id: str, deadline: Deadline) -> None:
        """As `erase`, by whoever has the lock of the sandbox."""
        places = self._places
        await self._kill(sandbox_id, places.records.read(sandbox_id), deadline)
        await places.group(sandbox_id).erase(deadline)
        await places.images.release(sandbox_id)
        await workers.run(workers.ENGINE, self._remove, sandbox_id)

    async def stop(self, sandbox_id: str, record: Record, deadline: Deadline) -> None:
        """Kill it and remove all that it needs to run. Its layer, its image and its record stay."""
        await self._kill(sandbox_id, record, deadline)
        await self._places.group(sandbox_id).erase(deadline)
        await workers.run(workers.ENGINE, self._remove_running_parts, sandbox_id)

    def settle(self, sandbox_id: str) -> None:
        """It runs: the runtime's own control group is no longer needed. What a runtime leaves in it goes with the
        sandbox."""
        with contextlib.suppress(OSError):
            self._places.starting(sandbox_id).remove()
        for directory in self._places.group(sandbox_id).directories():
            with contextlib.suppress(OSError):  # runtimes leave the list of sandboxes open to all users
                if directory.parent.stat().st_mode & 0o044:
                    directory.parent.chmod(0o711)

    async def expire(self, record: Record) -> Record:
        """Its time is up: end it, and keep the reason. For whoever has the lock of the sandbox."""
        ended = Ended(cause=Cause.TIMEOUT, reason=f"its lifetime of {record.spec.limits.lifetime_s:g} s was over")
        record = record.model_copy(update={"ended": ended})
        self._remember(record)
        await self._kill(record.sandbox_id, record, Deadline.after(10))
        return record

    def explain(self, record: Record) -> Ended | None:
        """Why a sandbox that is no longer running ended, from what the kernel still knows. Written down, unless
        somebody is at work on it. None: the record is not that of the sandbox any more."""
        ended = self._explain(record)
        with self._places.exclusion.at_once(record.sandbox_id) as mine:
            if self._places.records.read(record.sandbox_id) != record:
                return None
            if mine:
                self._remember(record.model_copy(update={"ended": ended}))
        return ended

    async def collect(self, deadline: Deadline) -> list[str]:
        """Remove sandboxes whose maker died before they ran, and whatever bears the name of none. What is left when the
        time is up is for the next time."""
        places = self._places
        removed: list[str] = []
        for sandbox_id in await workers.run(workers.ENGINE, self._abandoned):
            if not deadline.left():
                return removed
            with _beside_the_rest(sandbox_id), places.exclusion.at_once(sandbox_id) as mine:
                # Somebody may have begun to complete it, or to delete it, since we looked.
                if (mine or not places.records.home(sandbox_id).exists()) and self._is_abandoned(sandbox_id):
                    await self.erase_held(sandbox_id, deadline)
                    removed.append(f"sandbox {sandbox_id}")
        for sandbox_id in await workers.run(workers.ENGINE, self._strays):
            if not deadline.left():
                return removed
            with _beside_the_rest(sandbox_id):
                if not places.records.exists(sandbox_id):
                    await self.erase_held(sandbox_id, deadline)
                    removed.append(f"leftovers of {sandbox_id}")
        removed += await workers.run(workers.ENGINE, self._checkpoints.collect)
        await workers.run(workers.ENGINE, places.sweep)
        await workers.run(workers.ENGINE, places.remove_empty_groups)
        return removed

    async def collect_shared(self) -> list[str]:
        """Let go of what sandboxes share and none uses."""
        removed = ["the network gateway"] if await workers.run(workers.ENGINE, self._places.gateway.collect) else []
        claimed = await workers.run(workers.ENGINE, self._places.collect_claims)
        removed += [f"{what} of an installation that is gone" for what in claimed]
        await workers.run(workers.ENGINE, self._places.close)
        return removed

    # --- its parts -------------------------------------------------------------------------------------------------

    async def _interrupt(self, sandbox_id: str) -> None:
        """Whatever somebody still does to it fails: all its processes die, and those that are just starting it."""
        for group in (self._places.starting(sandbox_id), self._places.group(sandbox_id)):
            with contextlib.suppress(EngineError, OSError):
                await group.kill(Deadline.after(_INTERRUPT_S))

    def _abandoned(self) -> list[str]:
        return [sandbox_id for sandbox_id in self._places.records.ids() if self._is_abandoned(sandbox_id)]

    def _is_abandoned(self, sandbox_id: str) -> bool:
        """Its maker died before it ran, or somebody who was deleting it did."""
        record = self._places.records.read(sandbox_id)
        return record is None or record.was_never_made() or self._places.exclusion.is_being_deleted(sandbox_id)

    async def _kill(self, sandbox_id: str, record: Record | None, deadline: Deadline) -> None:
        starting, group = self._places.starting(sandbox_id), self._places.group(sandbox_id)
        await starting.erase(deadline)
        if record is not None and record.init is not None and record.is_of_this_boot():
            # With the first process of a PID namespace the kernel ends all others, before it reports its end.
            ending = asyncio.ensure_future(processes.kill({record.init}, deadline))
            await asyncio.sleep(0)
            group.thaw()
            if not await ending:
                raise EngineError(f"processes of sandbox '{sandbox_id}' do not end", hint="Delete it again later.")
        await group.kill(deadline)

    def _remove(self, sandbox_id: str) -> None:
        self._remove_running_parts(sandbox_id)
        try:
            self._places.forget_network(sandbox_id)
            self._places.layers.delete_layer(sandbox_id)
            self._checkpoints.delete_all(sandbox_id)
            self._places.records.forget(sandbox_id)
            self._places.forget_group(sandbox_id)
        except OSError as error:
            raise EngineError(f"files of sandbox '{sandbox_id}' cannot be removed: {error}") from error

    def _remove_running_parts(self, sandbox_id: str) -> None:
        try:
            # Made by us and the runtime, never by the sandbox.
            _remove_tree(self._places.run(sandbox_id))
            self._places.gateway.detach(sandbox_id)
            self._places.ids.release_all(sandbox_id)
        except OSError as error:
            raise EngineError(f"files of sandbox '{sandbox_id}' cannot be removed: {error}") from error

    def _strays(self) -> list[str]:
        """Names of which there is a part but no record."""
        places = self._places
        found = set(places.layers.list()) | set(places.ids.owners().values())
        with contextlib.suppress(OSError):
            found |= {name for name in os.listdir(places.run("x").parent) if not name.startswith(".")}
        found |= {name.removeprefix(STARTING) for name in places.accounts.names()}
        return sorted(found - set(places.records.ids()) - {""})

    def _remember(self, record: Record) -> None:
        # It fails when the disk is full: then it is found out again, less exactly.
        with contextlib.suppress(OSError):
            self._places.records.write(record)

    def _explain(self, record: Record) -> Ended:
        if not record.is_of_this_boot():
            return Ended(cause=Cause.HOST, reason="the machine was restarted")
        if record.init is None:
            return Ended(cause=Cause.LOST, reason="the process that was making it died")
        events, limits = self._places.group(record.sandbox_id).events(), record.limits
        if events.oom_kills and limits.memory_bytes is not None:
            return Ended(cause=Cause.OUT_OF_MEMORY, reason=f"its memory of {limits.memory_bytes} bytes was used up")
        if events.pids_refused:
            return Ended(cause=Cause.PIDS, reason=f"its {limits.pids or 'many'} processes were used up")
        if limits.disk_bytes is not None and self._places.layers.is_full(record.sandbox_id):
            return Ended(cause=Cause.DISK_FULL, reason=f"its disk of {limits.disk_bytes} bytes was full")
        return Ended(cause=Cause.LOST, reason="its first process ended")


@contextlib.contextmanager
def _beside_the_rest(sandbox_id: str) -> Iterator[None]:
    """What cannot be removed now is for the next time, and keeps nothing else from being removed."""
    try:
        yield
    except (EngineError, OSError) as error:
        _log.warning("what is left of sandbox %s cannot be removed: %s", sandbox_id, error)


def _remove_tree(path: Path) -> None:
    """Again, if a runtime that somebody called to connect to the sandbox writes its own files there at this moment: it
    finds no sandbox any more, and ends."""
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
