"""Stores saved states: a record, a subvolume and perhaps memory and a lease on an image, all or nothing.

A sandbox, its checkpoints and its earlier layers form one account of the storage, with one limit. What a fork inherited
from the state of another sandbox is not counted in its account, so it is subtracted from the limit instead. A sandbox
and everything that it inherited thus never exceed its disk limit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.archive import tree
from atoll.archive.work import Work
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.linux_record import Base, Record
from atoll.engines.linux.states.saved_state import LEASE, SavedState, SavedStates
from atoll.errors import ConflictError


class StateStorage:
    """The saved states of an installation. All methods block, and their effects become visible to other processes only
    when they are complete."""

    def __init__(self, layout: SandboxLayout) -> None:
        self._layout = layout
        self.records = SavedStates(layout.data / "saved")
        self.steps = SavedStates(layout.data / "steps")
        """The steps of builds, apart from the others, because there may be thousands."""
        self.ready = SavedStates(layout.data / "ready")
        """The memory of ready sandboxes, apart from the others, because each creation looks through them."""
        self._all = (self.records, self.steps, self.ready)

    @contextmanager
    def new_id(self, records: SavedStates | None = None) -> Iterator[str]:
        """Provide an id for a new state. If no state was written when the context ends, everything made for it is
        removed."""
        records = records or self.records
        saved_id = records.new_id()
        try:
            yield saved_id
        finally:
            if records.read(saved_id) is None:
                records.release(saved_id)
                self.remove(saved_id)
            records.abandon(saved_id)

    def read(self, saved_id: str) -> SavedState | None:
        """Return the saved state with this id, of any kind, or None."""
        return next((saved for records in self._all if (saved := records.read(saved_id)) is not None), None)

    def use(self, source: SavedState, sandbox_id: str) -> bool:
        """Keep a state for a sandbox. Returns False if it is gone already."""
        places = {"step": self.steps, "ready": self.ready}
        return places.get(source.kind, self.records).use(source.id, sandbox_id)

    def write(self, saved: SavedState) -> SavedState:
        if saved.base.digest and saved.kind == "snapshot":  # the others exist only as long as their sandbox
            self._layout.images.store.lease(LEASE + saved.id, saved.base.digest, Work())
        if saved.kind != "snapshot":
            self.records.write(saved)
            return saved
        with self.records.locked():
            self.refuse_taken(saved.name)
            self.records.write(saved)
        return saved

    def refuse_taken(self, name: str) -> None:
        if self.records.snapshot(name) is not None:
            raise ConflictError(
                f"there is already a snapshot {name.rpartition('/')[2]!r}",
                hint="Delete it first, or choose another name.",
            )

    def base_of(self, record: Record) -> Base:
        """Return the image below the sandbox's layer."""
        if record.base is not None:
            return record.base
        digest = self._layout.images.store.leased_by(record.sandbox_id)
        image = self._layout.images.store.of_digest(digest) if digest else None
        return Base.of(image, record.spec.image) if image is not None else Base(image=record.spec.image, digest=digest)

    def size_bytes(self, record: Record) -> int:
        return record.inherited_bytes + (self._layout.layers.usage(record.sandbox_id) or 0)

    def memory_bytes(self, saved_id: str) -> int:
        return sum(entry.stat().st_size for entry in os.scandir(self._layout.memory(saved_id)))

    def link_memory(self, source_id: str, saved_id: str) -> None:
        """Add hard links to the memory files of a state, which never change, under another id."""
        source, target = self._layout.memory(source_id), self._layout.memory(saved_id)
        target.mkdir(mode=0o700, parents=True)
        for name in os.listdir(source):
            os.link(source / name, target / name)

    # --- the end -----------------------------------------------------------------------------------------------------

    def delete(self, saved_id: str) -> None:
        if self.records.forget(saved_id):
            self.remove(saved_id)

    def release(self, saved_id: str) -> None:
        if self.records.release(saved_id):
            self.remove(saved_id)

    def delete_all(self, sandbox_id: str) -> None:
        tree.remove(self._layout.memory(sandbox_id))
        for saved in self.records.of(sandbox_id):
            self.delete(saved.id)
        for records in self._all:
            for saved_id in records.used_by(sandbox_id):
                if records.leave(saved_id, sandbox_id):
                    self.remove(saved_id)

    def collect(self) -> list[str]:
        """Remove what processes that died left behind, and what belonged to sandboxes that are gone. Return what was
        removed.

        Other processes may be making sandboxes and states meanwhile. Each records what it is going to make before it
        makes it. So a thing is a leftover only if there is no record of it after it was seen.
        """
        removed, lives = [], self._layout.records.exists
        for saved in self.records.all():
            if saved.sandbox_id and not lives(saved.sandbox_id):
                self.delete(saved.id)
                removed.append(f"checkpoint {saved.id} of {saved.sandbox_id}")
        for records in self._all:
            for saved_id in records.unused(lives):
                self.remove(saved_id)
        for saved_id in self._layout.layers.list_saved():
            if not self._is_known(saved_id):
                self._layout.layers.delete_saved(saved_id)
                removed.append(f"incomplete checkpoint {saved_id}")
        for lease in self._layout.images.store.leases():
            if lease.startswith(LEASE) and not self._is_known(lease.removeprefix(LEASE)):
                self._layout.images.store.release(lease)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._layout.memory("x").parent):
                if not self._is_known(name) and not lives(name):
                    tree.remove(self._layout.memory(name))
        for records in self._all:
            records.sweep()
        return removed

    def _is_known(self, saved_id: str) -> bool:
        return any(records.is_known(saved_id) for records in self._all)

    def remove(self, saved_id: str) -> None:
        tree.remove(self._layout.memory(saved_id))
        self._layout.layers.delete_saved(saved_id)
        self._layout.images.store.release(LEASE + saved_id)
