"""Makes, lists, compares and deletes checkpoints of sandboxes.

Theory of operation. A sandbox's files are an image that never changes and a writable layer, which is a btrfs subvolume.
A saved state is a read-only btrfs snapshot of that subvolume. The kernel takes it atomically while the sandbox runs,
and it shares all equal blocks with the subvolume. A new layer begins as a btrfs snapshot of a saved state.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Literal

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.host.saved_states import checked_name
from atoll.engines.linux.host_image import host_view
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Base, Record
from atoll.engines.linux.states import overlay_diff
from atoll.engines.linux.states.saved_state import SavedState
from atoll.engines.linux.states.state_storage import StateStorage
from atoll.errors import CheckpointNotFoundError, EngineError, SandboxResourceError
from atoll.model.checkpoint import Change, Checkpoint
from atoll.workers import Cancellation

Dump = Callable[[Path], AbstractAsyncContextManager[None]]
"""A function that writes the memory of a sandbox to a directory. The sandbox is stopped while the context is open."""
Kind = Literal["checkpoint", "origin"]
MAX_CHECKPOINTS = 1000


class Checkpoints:
    def __init__(self, layout: SandboxLayout, storage: StateStorage) -> None:
        self._layout = layout
        self._storage = storage

    async def make(self, record: Record, name: str, made_by: str, dump: Dump | None = None) -> Checkpoint:
        if name:
            checked_name(name)
        return (await finish(self._make(record, name, made_by, dump))).as_checkpoint()

    def of(self, sandbox_id: str) -> list[Checkpoint]:
        return [saved.as_checkpoint() for saved in self._storage.records.of(sandbox_id) if saved.kind == "checkpoint"]

    def find(self, sandbox_id: str, checkpoint: str) -> SavedState:
        """Return the checkpoint with this id, or the newest one with this name. Raises CheckpointNotFoundError."""
        for saved in reversed(self._storage.records.of(sandbox_id)):
            if checkpoint and saved.kind == "checkpoint" and checkpoint in (saved.id, saved.name):
                return saved
        raise CheckpointNotFoundError(
            f"sandbox '{sandbox_id}' has no checkpoint {checkpoint[:80]!r}", hint="`checkpoints()` lists what there is."
        )

    def state(self, saved_id: str) -> SavedState | None:
        """Return the saved state with this id, of any kind, or None."""
        return self._storage.read(saved_id)

    async def delete(self, sandbox_id: str, checkpoint: str) -> None:
        with contextlib.suppress(CheckpointNotFoundError):
            saved = await workers.run(workers.ENGINE, self.find, sandbox_id, checkpoint)
            await finish(workers.run(workers.ENGINE, self._storage.delete, saved.id))
            if saved.memory and (record := self._layout.records.read(sandbox_id)) is not None:
                await finish(workers.run(workers.ENGINE, self.set_limit, record))

    def set_limit(self, record: Record) -> None:
        """Set the limit of the sandbox's files: its disk limit less the memory in its checkpoints, which is stored
        elsewhere."""
        most = record.layer_limit_bytes(self._memory_kept(record.sandbox_id))
        self._layout.layers.limit(record.sandbox_id, most)

    # --- comparing ---------------------------------------------------------------------------------------------------

    async def diff(self, record: Record, old: str, new: str | None, *, text: bool) -> list[Change]:
        """Compare two checkpoints, or (None) a checkpoint with the present state. Cancelling ends the comparison at its
        next step and removes what it made."""
        return await workers.run_cancellable(
            workers.COMPARISON, lambda cancellation: self._diff(record, old, new, text, cancellation)
        )

    def _diff(self, record: Record, old: str, new: str | None, text: bool, cancellation: Cancellation) -> list[Change]:
        layers = self._layout.layers
        before = self.find(record.sandbox_id, old)
        inner, lowers = self._below(before.base)
        with contextlib.ExitStack() as held:
            if new is None:
                # Compare with a snapshot, because the layer itself is in use.
                now = held.enter_context(self._storage.new_id())
                layers.save(record.sandbox_id, now)
                held.callback(layers.delete_saved, now)
            else:
                now = self.find(record.sandbox_id, new).id
            one = held.enter_context(layers.looking(before.id, saved=True)) / "upper" / inner
            other = held.enter_context(layers.looking(now, saved=True)) / "upper" / inner
            try:
                return overlay_diff.changes(one, other, lowers, text=text, cancellation=cancellation)
            except OverflowError as error:
                raise SandboxResourceError(f"the difference is too large: {error}") from error
            except OSError as error:
                raise EngineError(f"the states cannot be compared: {error}") from error

    def _below(self, base: Base) -> tuple[str, list[Path]]:
        """Return the name of the root directory in a layer, and the image's root directories below it."""
        if not base.digest:
            return host_view.INNER, [host_view.skeleton(self._layout.data / "host") / host_view.INNER]
        layers = self._layout.images.store.layers(base.digest)
        return layers[0].name, [*layers]

    # --- where new sandboxes start -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def branching(self, record: Record, dump: Dump | None) -> AsyncIterator[SavedState]:
        """Save the present state for new sandboxes. The saved state is never listed, and is deleted with the last of
        them."""
        made: list[SavedState] = []

        async def make() -> None:
            made.append(await self._make(record, "", "fork", dump, kind="origin"))

        try:
            await finish(make())  # `finish` completes it even if this task is cancelled
            yield made[0]
        finally:
            for saved in made:
                await finish(workers.run(workers.ENGINE, self._storage.release, saved.id))

    def begin_with(self, sandbox_id: str, source: SavedState) -> None:
        """Keep the saved state that a new sandbox starts from for as long as the sandbox exists, so that the sandbox
        can be restarted even if the state is deleted. Raises CheckpointNotFoundError if it is gone already."""
        if not self._storage.use(source, sandbox_id):
            raise CheckpointNotFoundError(f"the state {source.name or source.id!r} was just deleted")

    # --- its parts ---------------------------------------------------------------------------------------------------

    async def _make(
        self,
        record: Record,
        name: str,
        made_by: str,
        dump: Dump | None,
        kind: Kind = "checkpoint",
    ) -> SavedState:
        if dump is None:
            return await workers.run(workers.ENGINE, self._save, record, name, made_by, kind)
        new = contextlib.ExitStack()
        saved_id = new.enter_context(self._storage.new_id())
        try:
            async with dump(self._layout.memory(saved_id)):
                await workers.run(workers.ENGINE, self._layout.layers.save, record.sandbox_id, saved_id)
            return await workers.run(workers.ENGINE, self._written, record, saved_id, name, made_by, kind, memory=True)
        finally:
            await workers.run(workers.ENGINE, new.close)  # it may have to remove much

    def _save(self, record: Record, name: str, made_by: str, kind: Kind) -> SavedState:
        with self._storage.new_id() as saved_id:
            self._layout.layers.save(record.sandbox_id, saved_id)
            return self._written(record, saved_id, name, made_by, kind, memory=False)

    def _written(
        self,
        record: Record,
        saved_id: str,
        name: str,
        made_by: str,
        kind: Kind,
        *,
        memory: bool,
    ) -> SavedState:
        if kind == "origin":
            self._storage.records.hold(saved_id)
        elif len(self._storage.records.of(record.sandbox_id)) >= MAX_CHECKPOINTS:
            raise SandboxResourceError(
                f"sandbox '{record.sandbox_id}' has {MAX_CHECKPOINTS} checkpoints", hint="Delete some first."
            )
        memory_bytes = self._memory_bytes(record, saved_id, kind) if memory else 0
        saved = self._storage.write(
            SavedState(
                id=saved_id,
                kind=kind,
                sandbox_id=record.sandbox_id if kind == "checkpoint" else "",
                name=name,
                created_at=time.time(),
                parent=self._layout.records.position(record),
                made_by=made_by,
                size_bytes=self._storage.size_bytes(record),
                base=self._storage.base_of(record),
                memory=memory,
                memory_bytes=memory_bytes,
                runtime=record.runtime,
            )
        )
        if memory and kind == "checkpoint":
            self.set_limit(record)
        return saved

    def _memory_bytes(self, record: Record, saved_id: str, kind: Kind) -> int:
        """Return the size of saved memory. Raises SandboxResourceError if it exceeds what the disk limit leaves."""
        size = self._storage.memory_bytes(saved_id)
        used = self._layout.layers.account_usage(record.sandbox_id)
        most = record.limits.disk_bytes
        if kind == "checkpoint" and used is not None and most is not None:
            left = most - record.origin_bytes - used - self._memory_kept(record.sandbox_id)
            if size > left:
                raise SandboxResourceError(
                    f"the memory of sandbox '{record.sandbox_id}' takes {size} bytes; its disk limit leaves {left}",
                    hint="Delete checkpoints or files, or make it with a larger disk.",
                )
        return size

    def _memory_kept(self, sandbox_id: str) -> int:
        return sum(saved.memory_bytes for saved in self._storage.records.of(sandbox_id) if saved.kind == "checkpoint")
