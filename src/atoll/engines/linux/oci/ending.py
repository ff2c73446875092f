"""The end of a sandbox, and why it ended. Everything is found by the sandbox's name, so it works on what another
process left half made."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil

from atoll.engines.linux.oci.checkpoints import Checkpoints
from atoll.engines.linux.oci.places import STARTING, Places
from atoll.engines.linux.oci.record import Ended, Record
from atoll.engines.local import processes
from atoll.engines.local.waiting import Deadline
from atoll.errors import EngineError
from atoll.model import Cause


class Ending:
    def __init__(self, places: Places, checkpoints: Checkpoints) -> None:
        self._places = places
        self._checkpoints = checkpoints

    async def erase(self, sandbox_id: str, deadline: Deadline) -> None:
        """Kill it and remove every trace, the record last. May be repeated, and by several at once."""
        places = self._places
        if not places.records.exists(sandbox_id):
            return
        await self._kill(sandbox_id, places.records.read(sandbox_id), deadline)
        await places.group(sandbox_id).erase(deadline)
        await places.images.release(sandbox_id)
        await asyncio.to_thread(self._remove, sandbox_id)

    async def stop(self, sandbox_id: str, record: Record, deadline: Deadline) -> None:
        """Kill it and remove all that it needs to run. Its layer, its image and its record stay."""
        await self._kill(sandbox_id, record, deadline)
        await self._places.group(sandbox_id).erase(deadline)
        await asyncio.to_thread(self._remove_running_parts, sandbox_id)

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
        """Its time is up: end it, and keep the reason."""
        ended = Ended(cause=Cause.TIMEOUT, reason=f"its lifetime of {record.spec.limits.lifetime_s:g} s was over")
        record = record.model_copy(update={"ended": ended})
        self._remember(record)
        await self._kill(record.sandbox_id, record, Deadline.after(10))
        return record

    def explain(self, record: Record) -> Ended:
        """Why a sandbox that is no longer running ended, from what the kernel still knows. Written down."""
        ended = self._explain(record)
        self._remember(record.model_copy(update={"ended": ended}))
        return ended

    async def collect(self, deadline: Deadline) -> list[str]:
        """Remove sandboxes whose maker died before they ran, and whatever bears the name of none."""
        places, removed = self._places, []
        for sandbox_id in places.records.ids():
            record = places.records.read(sandbox_id)
            if record is None or record.was_never_made():
                await self.erase(sandbox_id, deadline)
                removed.append(f"sandbox {sandbox_id}")
        for sandbox_id in await asyncio.to_thread(self._strays):
            await self._kill(sandbox_id, None, deadline)
            await places.group(sandbox_id).erase(deadline)
            await places.images.release(sandbox_id)
            await asyncio.to_thread(self._remove, sandbox_id)
            removed.append(f"leftovers of {sandbox_id}")
        removed += await asyncio.to_thread(self._checkpoints.collect, set(places.records.ids()))
        if await asyncio.to_thread(places.gateway.collect):
            removed.append("the network gateway")
        await asyncio.to_thread(places.sweep)
        removed += [
            f"{what} of an installation that is gone" for what in await asyncio.to_thread(places.collect_claims)
        ]
        await asyncio.to_thread(places.close)
        return removed

    # --- its parts -------------------------------------------------------------------------------------------------

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
        except OSError as error:
            raise EngineError(f"files of sandbox '{sandbox_id}' cannot be removed: {error}") from error

    def _remove_running_parts(self, sandbox_id: str) -> None:
        try:
            # Made by us and the runtime, never by the sandbox.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._places.run(sandbox_id))
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
        for directory in places.group("x").directories():
            with contextlib.suppress(OSError):
                found |= {entry.name.removeprefix(STARTING) for entry in os.scandir(directory.parent) if entry.is_dir()}
        return sorted(found - set(places.records.ids()) - {""})

    def _remember(self, record: Record) -> None:
        # It fails when the sandbox is just being deleted or the disk is full: then it is found out again, less exactly.
        with contextlib.suppress(OSError):
            self._places.records.write(record)

    def _explain(self, record: Record) -> Ended:
        if not record.is_of_this_boot():
            return Ended(cause=Cause.HOST, reason="the machine was restarted")
        if record.init is None:
            return Ended(cause=Cause.LOST, reason="the process that was making it died")
        events, limits = self._places.group(record.sandbox_id).events(), record.spec.limits
        if events.oom_kills and limits.memory_bytes is not None:
            return Ended(cause=Cause.OUT_OF_MEMORY, reason=f"its memory of {limits.memory_bytes} bytes was used up")
        if events.pids_refused:
            return Ended(cause=Cause.PIDS, reason=f"its {limits.pids or 'many'} processes were used up")
        if limits.disk_bytes is not None and self._places.layers.is_full(record.sandbox_id):
            return Ended(cause=Cause.DISK_FULL, reason=f"its disk of {limits.disk_bytes} bytes was full")
        return Ended(cause=Cause.LOST, reason="its first process ended")
