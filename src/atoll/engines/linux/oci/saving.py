"""An engine's saved states: what users do with them, one after another for each sandbox, whole or not at all."""

from __future__ import annotations

import abc
import functools
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from atoll import workers
from atoll.checkpoint import Change, Checkpoint, Snapshot
from atoll.engines.linux.oci import runtimes
from atoll.engines.linux.oci.checkpoints import Checkpoints, Dump, limit_for
from atoll.engines.linux.oci.ending import Ending
from atoll.engines.linux.oci.pausing import Pausing
from atoll.engines.linux.oci.places import Places
from atoll.engines.linux.oci.record import Ended, Record
from atoll.engines.linux.oci.runtimes import Runtime
from atoll.engines.linux.oci.saved import Saved
from atoll.engines.linux.oci.streams import Streams
from atoll.engines.local import exclusion, processes
from atoll.engines.local.processes import ProcessRef
from atoll.engines.local.states import all_or_none
from atoll.engines.local.waiting import Deadline, finish
from atoll.errors import CheckpointNotFoundError, EngineError, SandboxGoneError, SpecError, UnsupportedError
from atoll.images import tree
from atoll.model import Cause, Handle, SandboxSpec

_STOP_S = 30.0
_PAUSE_S = 10.0
_DUMP_S = 120.0
_DYING_S = 2.0
_AS_IT_IS = "as it is"
"""Not a saved state: its layer stays."""
_FORKS_AT_ONCE = 8


class Saving(abc.ABC):
    """A `Checkpointing`. What makes, starts and ends sandboxes is the engine's own."""

    _places: Places
    _checkpoints: Checkpoints
    _ending: Ending
    _streams: Streams
    _pausing: Pausing

    @abc.abstractmethod
    async def delete(self, handle: Handle) -> None: ...

    @abc.abstractmethod
    async def _create(self, sandbox_id: str, spec: SandboxSpec, source: Saved | None) -> Handle: ...

    @abc.abstractmethod
    async def _launch(self, record: Record, runtime: Runtime) -> Record: ...

    @abc.abstractmethod
    async def _existing(self, handle: Handle) -> None: ...

    @abc.abstractmethod
    def _runtime_named(self, name: str) -> Runtime: ...

    # --- checkpoints -----------------------------------------------------------------------------------------------

    async def checkpoint(
        self, handle: Handle, *, name: str = "", made_by: str = "user", memory: bool = False
    ) -> Checkpoint:
        await self._settled(handle, memory=memory)
        async with self._alone(handle.sandbox_id):
            record = self._living(handle) if memory else self._record(handle)
            dump = await self._dumping(record) if memory else None
            checkpoint = await self._checkpoints.make(record, name, made_by, dump)
            self._places.records.go_to(record.sandbox_id, checkpoint.id)
            return checkpoint

    async def checkpoints(self, handle: Handle) -> Sequence[Checkpoint]:
        self._record(handle)
        return await workers.run(workers.ENGINE, self._checkpoints.of, handle.sandbox_id)

    async def delete_checkpoint(self, handle: Handle, checkpoint_id: str) -> None:
        await self._checkpoints.delete(handle.sandbox_id, checkpoint_id)

    async def diff(self, handle: Handle, old: str, new: str | None = None, *, text: bool = False) -> Sequence[Change]:
        with self._places.exclusion.explaining(handle.sandbox_id):
            return await self._checkpoints.diff(self._record(handle), old, new, text=text)

    async def rollback(self, handle: Handle, checkpoint_id: str | None) -> None:
        async with self._alone(handle.sandbox_id):
            record = self._record(handle)
            if checkpoint_id is None:
                target, position = record.origin, None
            else:
                saved = await workers.run(workers.ENGINE, self._checkpoints.find, handle.sandbox_id, checkpoint_id)
                target = position = saved.id
            await finish(self._restore(record, target, position))

    # --- new sandboxes from old ones -------------------------------------------------------------------------------

    async def fork(
        self,
        handle: Handle,
        sandbox_ids: Sequence[str],
        checkpoint_id: str | None = None,
        *,
        memory: bool = False,
        labels: Sequence[Mapping[str, str]] = (),
    ) -> Sequence[Handle]:
        await self._settled(handle, memory=memory)
        record = self._record(handle)
        marks = labels or [record.spec.labels] * len(sandbox_ids)
        specs = [record.spec.model_copy(update={"labels": dict(each)}) for each in marks]
        async with AsyncExitStack() as held:
            if checkpoint_id is not None:
                with self._places.exclusion.explaining(handle.sandbox_id):
                    source = await workers.run(workers.ENGINE, self._checkpoints.find, handle.sandbox_id, checkpoint_id)
            else:
                # Of all that are made, each has the state of one moment.
                async with self._alone(handle.sandbox_id):
                    record = self._living(handle) if memory else self._record(handle)
                    dump = await self._dumping(record) if memory else None
                    source = await held.enter_async_context(self._checkpoints.branching(record, dump))
            wanted = list(zip(sandbox_ids, specs, strict=True))
            try:
                return await all_or_none(
                    wanted, lambda id, spec: self._create(id, spec, source), self.delete, _FORKS_AT_ONCE
                )
            except CheckpointNotFoundError:  # it went with the sandbox
                with self._places.exclusion.explaining(handle.sandbox_id):
                    raise

    async def snapshot(
        self, handle: Handle, name: str, checkpoint_id: str | None = None, *, memory: bool = False
    ) -> Snapshot:
        await self._settled(handle, memory=memory and checkpoint_id is None)
        if checkpoint_id is not None:
            with self._places.exclusion.explaining(handle.sandbox_id):
                source = await workers.run(workers.ENGINE, self._checkpoints.find, handle.sandbox_id, checkpoint_id)
                if memory and not source.memory:
                    raise SpecError(f"the checkpoint {checkpoint_id!r} has no memory", hint="Make it with memory=True.")
                return await self._checkpoints.keep(self._record(handle), name, source, memory=memory)
        async with self._alone(handle.sandbox_id):
            record = self._living(handle) if memory else self._record(handle)
            if not memory:
                return await self._checkpoints.keep(record, name, None)
            dump = await self._dumping(record)
            async with self._checkpoints.branching(record, dump) as now:
                return await self._checkpoints.keep(record, name, now, memory=True)

    async def snapshots(self) -> Sequence[Snapshot]:
        return await workers.run(workers.ENGINE, self._checkpoints.snapshots)

    async def delete_snapshot(self, name: str) -> None:
        await self._checkpoints.delete_snapshot(name)

    async def export_snapshot(self, name: str, file: Path) -> None:
        saved = await workers.run(workers.ENGINE, self._checkpoints.snapshot_named, name)
        await self._checkpoints.export(saved, file, await self._memory_version() if saved.memory else "")

    async def _memory_version(self) -> str:
        """What only the same version of can go on with a memory."""
        return await workers.run(workers.ENGINE, runtimes.version, self._places.settings.data_dir)

    async def import_snapshot(
        self, file: Path, name: str, *, most_bytes: int | None = None, memory: bool = False
    ) -> Snapshot:
        version = await self._memory_version() if memory else None
        return await self._checkpoints.take_in(file, name, most_bytes, version)

    # --- asleep on the disk ----------------------------------------------------------------------------------------

    async def hibernate(self, handle: Handle) -> None:
        """Pause it with its memory on the disk. If that fails it goes on."""
        await self._settled(handle, memory=True)
        async with self._alone(handle.sandbox_id):
            if not self._record(handle).asleep:
                record = self._living(handle)
                await finish(self._sleep(record, await self._dumping(record)))

    async def _sleep(self, record: Record, dump: Dump) -> None:
        memory = self._places.memory(record.sandbox_id)
        await workers.run(workers.ENGINE, tree.remove, memory)
        async with dump(memory):
            # From here on it is the memory on the disk that counts.
            asleep = record.model_copy(update={"init": None, "asleep": True})
            self._places.records.write(asleep)
            await self._ending.stop(record.sandbox_id, record, Deadline.after(_STOP_S))

    async def _wake_up(self, handle: Handle) -> None:
        async with self._alone(handle.sandbox_id):
            record = self._record(handle)
            if record.asleep:
                await finish(self._wake(record))

    async def _wake(self, record: Record) -> None:
        runtime = self._runtime_named(record.runtime)
        waking = record.model_copy(
            update={"memory": record.sandbox_id, "restoring": _AS_IT_IS, "creator": ourselves(os.getpid())}
        )
        await self._ending.stop(record.sandbox_id, record, Deadline.after(_STOP_S))  # what an earlier try left
        await self._launch(waking, runtime)
        await workers.run(workers.ENGINE, tree.remove, self._places.memory(record.sandbox_id))

    # --- its parts -------------------------------------------------------------------------------------------------

    async def _dumping(self, record: Record) -> Dump:
        """How to write its memory down. Says what stands in the way before anything happens."""
        if record.runtime != "runsc":
            raise UnsupportedError(
                f"the memory of a sandbox cannot be saved with '{record.runtime}': CRIU, which would have to, refuses"
                " processes that share their memory and namespaces that are not the sandbox's own",
                hint="Make the sandbox with isolation='gvisor'.",
            )
        runtime = self._runtime_named(record.runtime)
        await self._streams.leave(record.sandbox_id)

        @asynccontextmanager
        async def dump(target: Path) -> AsyncIterator[None]:
            await workers.run(workers.ENGINE, target.mkdir, mode=0o700, parents=True)
            async with self._explained(record), self._pausing.holding(record.sandbox_id, runtime, _PAUSE_S):
                await self._pausing.dump(record.sandbox_id, runtime, target, Deadline.after(_DUMP_S))
                yield

        return dump

    @asynccontextmanager
    async def _explained(self, record: Record) -> AsyncIterator[None]:
        """What a runtime cannot do because the sandbox is just dying is reported as its end."""
        try:
            yield
        except EngineError as error:
            self._places.exclusion.refuse_deleted(record.sandbox_id)
            if record.init is None or await processes.wait({record.init}, Deadline.after(_DYING_S)):
                gone = f"sandbox '{record.sandbox_id}' has just ended"
                raise SandboxGoneError(gone, cause=Cause.LOST.value) from error
            raise

    async def _unfreeze(self, record: Record) -> None:
        """Whoever held it still to save it has died: it goes on as before."""
        async with self._alone(record.sandbox_id):
            if self._pausing.is_abandoned(record.sandbox_id):
                runtime = self._runtime_named(record.runtime)
                await finish(self._pausing.let_go(record.sandbox_id, runtime, Deadline.after(_PAUSE_S)))

    def _record(self, handle: Handle) -> Record:
        record = self._places.records.read(handle.sandbox_id)
        if record is None:
            raise exclusion.deleted(handle.sandbox_id)
        if record.was_never_made():
            raise SandboxGoneError(
                f"sandbox '{handle.sandbox_id}' was never finished: the process that was making it died",
                cause=Cause.LOST.value,
            )
        return record

    def _living(self, handle: Handle) -> Record:
        """As `_record`, for whoever has the lock and needs its processes."""
        record = self._record(handle)
        if not record.is_alive():
            raise SandboxGoneError(f"sandbox '{handle.sandbox_id}' has just ended", cause=Cause.LOST.value)
        return record

    def _alone(self, sandbox_id: str) -> AbstractAsyncContextManager[None]:
        """Nobody else, also no other process of ours, changes this sandbox meanwhile."""
        return self._places.exclusion.alone(sandbox_id)

    async def _settled(self, handle: Handle, *, memory: bool = False) -> None:
        """Complete what somebody who died was doing to it. SandboxGoneError if it has been deleted, and if it has ended
        although its memory is wanted."""
        record = self._record(handle)
        if record.restoring is not None:
            await self._completed(record)
        if memory:
            await self._existing(handle)

    async def _restore(self, record: Record, target: str | None, position: str | None) -> Record:
        """From the note on, whoever looks at the sandbox next completes it if we die; before, nothing has happened."""
        saved = self._checkpoints.states.read(target) if target else None
        if target and saved is None:
            raise CheckpointNotFoundError(f"the state '{target}' is gone")
        restored = record.model_copy(
            update={
                "init": None,
                "ended": None,
                "restoring": target or "",
                "position": position,
                "inherited_bytes": saved.size_bytes if saved is not None else 0,
                "memory": saved.id if saved is not None and saved.memory else None,
                "asleep": False,
                "creator": ourselves(os.getpid()),
                "boot_id": processes.boot_id(),
            }
        )
        runtime = self._runtime_named(record.runtime)
        replacement = await workers.run(
            workers.ENGINE, self._places.layers.replace_layer, record.sandbox_id, limit_for(restored), target
        )
        try:
            try:
                self._places.records.write(restored)
                self._places.records.go_to(record.sandbox_id, position)
            except FileNotFoundError:
                raise exclusion.deleted(record.sandbox_id) from None
            self._streams.drop(record.sandbox_id)
            await self._ending.stop(record.sandbox_id, record, Deadline.after(_STOP_S))
            await workers.run(workers.ENGINE, replacement.commit)
        finally:
            await workers.run(workers.ENGINE, replacement.discard)
        try:
            self._places.exclusion.refuse_deleted(record.sandbox_id)
            return await self._launch(restored, runtime)
        except Exception as error:
            ended = Ended(cause=Cause.LOST, reason=f"it could not be started again: {error}")
            # It still says what it was going back to: without, it would look like one that was never made.
            with suppress(OSError):
                self._places.records.write(restored.model_copy(update={"ended": ended}))
            raise
        finally:
            # It had a little room to be started, however full its account is.
            await workers.run(workers.ENGINE, self._checkpoints.set_limit, restored)

    async def _completed(self, record: Record) -> Record:
        """If whoever was restoring it died or gave up, go on with that. As it is, if somebody is at work on it."""
        if record.restoring is None or record.ended is not None or not record.is_of_this_boot():
            return record
        places = self._places
        with places.exclusion.at_once(record.sandbox_id) as mine:
            record = places.records.read(record.sandbox_id) or record
            if not mine or record.restoring is None or places.exclusion.is_being_deleted(record.sandbox_id):
                return record
            return await finish(self._restore(record, record.restoring or None, record.position))


@functools.lru_cache(maxsize=1)
def ourselves(pid: int) -> ProcessRef:
    found = ProcessRef.of(pid)
    assert found is not None
    return found
