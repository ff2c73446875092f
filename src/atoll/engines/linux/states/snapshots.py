"""Snapshots: saved states with a name that belong to no sandbox. Also their export to files and import from them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from atoll import workers
from atoll.cancellation import finish
from atoll.engines.host.saved_states import checked_snapshot
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Base, Record
from atoll.engines.linux.states.saved_state import SavedState
from atoll.engines.linux.states.state_storage import StateStorage
from atoll.errors import ImageNotFoundError, SnapshotNotFoundError
from atoll.model.checkpoint import Snapshot

if TYPE_CHECKING:
    from atoll.engines.linux.states.snapshot_file import MemoryFormat

SNAPSHOT = "snapshot:"
"""The prefix of an image name that stands for a snapshot."""


class Snapshots:
    def __init__(self, layout: SandboxLayout, storage: StateStorage) -> None:
        self._layout = layout
        self._storage = storage

    def named(self, image: str) -> SavedState:
        """Return the snapshot that `snapshot:NAME` stands for. Raises SnapshotNotFoundError."""
        saved = self._storage.records.snapshot(image.removeprefix(SNAPSHOT))
        if saved is None:
            raise SnapshotNotFoundError(
                f"there is no snapshot {image.removeprefix(SNAPSHOT)[:80]!r}", hint="'atoll snapshot ls' lists them."
            )
        return saved

    def all(self) -> list[Snapshot]:
        return [saved.as_snapshot() for saved in self._storage.records.all() if saved.kind == "snapshot"]

    async def keep(self, record: Record, name: str, source: SavedState | None, *, memory: bool = False) -> Snapshot:
        """Make a snapshot of a saved state, with its memory if that is wanted, or (None) of the sandbox's present
        files."""
        checked_snapshot(name)
        return (await finish(workers.run(workers.ENGINE, self._keep, record, name, source, memory))).as_snapshot()

    async def delete(self, name: str) -> None:
        saved = await workers.run(workers.ENGINE, self._storage.records.snapshot, name)
        if saved is not None:
            await finish(workers.run(workers.ENGINE, self._storage.delete, saved.id))

    async def export(self, saved: SavedState, file: Path) -> None:
        await finish(workers.run(workers.TRANSFER, self._export, saved, file))

    async def take_in(
        self, file: Path, name: str, most_bytes: int | None = None, memory_format: MemoryFormat | None = None
    ) -> Snapshot:
        """Import a snapshot from a file, with its memory if `memory_format` is given."""
        checked_snapshot(name)
        return (
            await finish(workers.run(workers.TRANSFER, self._take_in, file, name, most_bytes, memory_format))
        ).as_snapshot()

    # --- its parts, which block --------------------------------------------------------------------------------------

    def _keep(self, record: Record, name: str, source: SavedState | None, memory: bool) -> SavedState:
        self._storage.refuse_taken(name)
        with self._storage.new_id() as saved_id:
            if source is not None and memory:
                self._storage.link_memory(source.id, saved_id)
            if source is not None:
                self._layout.layers.copy_saved(source.id, saved_id)
            else:
                self._layout.layers.save(record.sandbox_id, saved_id)
            size_bytes = source.size_bytes if source is not None else self._storage.size_bytes(record)
            base = source.base if source is not None else self._storage.base_of(record)
            return self._write(saved_id, name, record.sandbox_id, size_bytes, base, record.runtime if memory else "")

    def _export(self, saved: SavedState, file: Path) -> None:
        from atoll.engines.linux.states import snapshot_file

        memory = snapshot_file.Memory.saved_in(self._layout.memory(saved.id)) if saved.memory else None
        snapshot_file.write(self._layout.layers, saved, file, memory)

    def _take_in(self, file: Path, name: str, most_bytes: int | None, memory_format: MemoryFormat | None) -> SavedState:
        from atoll.engines.linux.states import snapshot_file

        self._storage.refuse_taken(name)
        with snapshot_file.opened(file, most_bytes) as incoming, self._storage.new_id() as saved_id:
            memory = memory_format if incoming.has_memory else None
            if memory is not None:
                incoming.unpack_memory(self._layout.memory(saved_id), memory.version())
            if incoming.base.digest and not self._layout.images.store.root(incoming.base.digest).is_dir():
                raise ImageNotFoundError(
                    f"the snapshot was made from the image {incoming.base.image!r} ({incoming.base.digest}), "
                    "which is not on this machine",
                    hint="Get that image first, in the same version.",
                )
            self._layout.layers.make_saved(saved_id, incoming.unpack)
            runtime = memory.runtime if memory is not None else ""
            return self._write(saved_id, name, file.name, incoming.size_bytes, incoming.base, runtime)

    def _write(self, saved_id: str, name: str, source: str, size_bytes: int, base: Base, runtime: str) -> SavedState:
        """Write the record of a snapshot. `runtime` is the launcher that saved its memory, or empty if it has none."""
        return self._storage.write(
            SavedState(
                id=saved_id,
                kind="snapshot",
                name=name,
                created_at=time.time(),
                source=source,
                size_bytes=size_bytes,
                base=base,
                memory=bool(runtime),
                memory_bytes=self._storage.memory_bytes(saved_id) if runtime else 0,
                runtime=runtime,
            )
        )
