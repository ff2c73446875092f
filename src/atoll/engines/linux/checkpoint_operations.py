"""The operations on saved states. For each sandbox they run one at a time, and each completes or changes nothing."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.host.saved_states import all_or_none, fork_specs, none_if_failed
from atoll.engines.linux.launcher import Launchers
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Record
from atoll.engines.linux.observation import Observer
from atoll.engines.linux.restoration import Restoration
from atoll.engines.linux.standstill import Standstill
from atoll.engines.linux.states.checkpoints import Checkpoints, Dump
from atoll.engines.linux.states.saved_state import SavedState
from atoll.engines.linux.states.snapshots import Snapshots
from atoll.errors import CheckpointNotFoundError, SpecError, UnsupportedError
from atoll.model import Handle, SandboxSpec
from atoll.model.checkpoint import Change, Checkpoint, Snapshot
from atoll.waiting import Deadline

if TYPE_CHECKING:
    from atoll.engines.linux.states.snapshot_file import MemoryFormat

_PAUSE_S = 10.0
_DUMP_S = 120.0
_FORKS_AT_ONCE = 8


class CheckpointOperations(abc.ABC):
    """Implements `Checkpointing`. Creating and deleting sandboxes is left to the engine that derives from it."""

    layout: SandboxLayout
    _launchers: Launchers
    _memory_format: MemoryFormat
    _checkpoints: Checkpoints
    _snapshots: Snapshots
    _observer: Observer
    _restoration: Restoration
    _standstill: Standstill

    @abc.abstractmethod
    async def delete(self, handle: Handle) -> None: ...

    @abc.abstractmethod
    async def _create(self, sandbox_id: str, spec: SandboxSpec, source: SavedState | None) -> Handle: ...

    # --- checkpoints -----------------------------------------------------------------------------------------------

    async def checkpoint(
        self, handle: Handle, *, name: str = "", made_by: str = "user", memory: bool = False
    ) -> Checkpoint:
        await self._observer.settle(handle.sandbox_id, memory=memory)
        async with self.layout.exclusion.alone(handle.sandbox_id):
            record = self._observer.record(handle.sandbox_id, living=memory)
            dump = await self._dumping(record) if memory else None
            checkpoint = await self._checkpoints.make(record, name, made_by, dump)
            self.layout.records.go_to(record.sandbox_id, checkpoint.id)
            return checkpoint

    async def checkpoints(self, handle: Handle) -> Sequence[Checkpoint]:
        self._observer.record(handle.sandbox_id)
        return await workers.run(workers.ENGINE, self._checkpoints.of, handle.sandbox_id)

    async def delete_checkpoint(self, handle: Handle, checkpoint_id: str) -> None:
        await self._checkpoints.delete(handle.sandbox_id, checkpoint_id)

    async def diff(self, handle: Handle, old: str, new: str | None = None, *, text: bool = False) -> Sequence[Change]:
        with self.layout.exclusion.explaining(handle.sandbox_id):
            return await self._checkpoints.diff(self._observer.record(handle.sandbox_id), old, new, text=text)

    async def rollback(self, handle: Handle, checkpoint_id: str | None) -> None:
        async with self.layout.exclusion.alone(handle.sandbox_id):
            record = self._observer.record(handle.sandbox_id)
            if checkpoint_id is None:
                target, position = record.origin, None
            else:
                saved = await workers.run(workers.ENGINE, self._checkpoints.find, handle.sandbox_id, checkpoint_id)
                target = position = saved.id
            await finish(self._restoration.restore(record, target, position))

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
        await self._observer.settle(handle.sandbox_id, memory=memory)
        record = self._observer.record(handle.sandbox_id)
        specs = fork_specs(record.spec, len(sandbox_ids), labels)
        async with none_if_failed(self.delete) as made, AsyncExitStack() as held:
            if checkpoint_id is not None:
                with self.layout.exclusion.explaining(handle.sandbox_id):
                    source = await workers.run(workers.ENGINE, self._checkpoints.find, handle.sandbox_id, checkpoint_id)
            else:
                # All forks start from the state of the same moment.
                async with self.layout.exclusion.alone(handle.sandbox_id):
                    record = self._observer.record(handle.sandbox_id, living=memory)
                    dump = await self._dumping(record) if memory else None
                    source = await held.enter_async_context(self._checkpoints.branching(record, dump))
            wanted = list(zip(sandbox_ids, specs, strict=True))
            try:
                made += await all_or_none(
                    wanted, lambda id, spec: self._create(id, spec, source), self.delete, _FORKS_AT_ONCE
                )
            except CheckpointNotFoundError:  # it may have been deleted with the sandbox
                with self.layout.exclusion.explaining(handle.sandbox_id):
                    raise
        return made

    async def snapshot(
        self, handle: Handle, name: str, checkpoint_id: str | None = None, *, memory: bool = False
    ) -> Snapshot:
        await self._observer.settle(handle.sandbox_id, memory=memory and checkpoint_id is None)
        if checkpoint_id is not None:
            with self.layout.exclusion.explaining(handle.sandbox_id):
                source = await workers.run(workers.ENGINE, self._checkpoints.find, handle.sandbox_id, checkpoint_id)
                if memory and not source.memory:
                    raise SpecError(f"the checkpoint {checkpoint_id!r} has no memory", hint="Make it with memory=True.")
                record = self._observer.record(handle.sandbox_id)
                return await self._snapshots.keep(record, name, source, memory=memory)
        async with self.layout.exclusion.alone(handle.sandbox_id):
            record = self._observer.record(handle.sandbox_id, living=memory)
            if not memory:
                return await self._snapshots.keep(record, name, None)
            dump = await self._dumping(record)
            async with self._checkpoints.branching(record, dump) as now:
                return await self._snapshots.keep(record, name, now, memory=True)

    async def snapshots(self) -> Sequence[Snapshot]:
        return await workers.run(workers.ENGINE, self._snapshots.all)

    async def delete_snapshot(self, name: str) -> None:
        await self._snapshots.delete(name)

    async def export_snapshot(self, name: str, file: Path) -> None:
        saved = await workers.run(workers.ENGINE, self._snapshots.named, name)
        await self._snapshots.export(saved, file)

    async def import_snapshot(
        self, file: Path, name: str, *, most_bytes: int | None = None, memory: bool = False
    ) -> Snapshot:
        return await self._snapshots.take_in(file, name, most_bytes, self._memory_format if memory else None)

    # --- hibernating -----------------------------------------------------------------------------------------------

    async def hibernate(self, handle: Handle) -> None:
        """Pause the sandbox and move its memory to disk. If that fails, the sandbox goes on."""
        await self._observer.settle(handle.sandbox_id, memory=True)
        async with self.layout.exclusion.alone(handle.sandbox_id):
            if not self._observer.record(handle.sandbox_id).asleep:
                record = self._observer.record(handle.sandbox_id, living=True)
                await finish(self._restoration.sleep(record, await self._dumping(record)))

    async def _wake_up(self, handle: Handle) -> None:
        async with self.layout.exclusion.alone(handle.sandbox_id):
            record = self._observer.record(handle.sandbox_id)
            if record.asleep:
                await finish(self._restoration.wake(record))

    # --- its parts -------------------------------------------------------------------------------------------------

    async def _dumping(self, record: Record) -> Dump:
        """Return the function that saves the sandbox's memory.

        Nothing is saved yet. Raises UnsupportedError, EngineUnavailableError or EngineError if memory cannot be saved.
        """
        launcher, sandbox_id = self._launchers.named(record.runtime), record.sandbox_id
        memory = launcher.memory
        if memory is None:
            raise UnsupportedError(
                f"the memory of a sandbox cannot be saved with '{launcher.name}': CRIU, which would be needed, does not"
                " support processes that share memory, or namespaces that do not belong to the sandbox",
                hint="Make the sandbox with isolation='gvisor'.",
            )
        launcher.check()
        await memory.disconnect(sandbox_id)

        @asynccontextmanager
        async def dump(target: Path) -> AsyncIterator[None]:
            await workers.run(workers.ENGINE, target.mkdir, mode=0o700, parents=True)
            async with (
                self._observer.explaining_end(record),
                self._standstill.holding(sandbox_id, launcher, _PAUSE_S),
            ):
                await memory.dump(sandbox_id, target, Deadline.after(_DUMP_S))
                yield

        return dump
