"""Saved states of sandboxes: made, listed, compared, kept under names, removed.

Theory of operation. A sandbox's files are an image that nobody changes and a writable layer, a subvolume. A saved
state is a read-only snapshot of that subvolume: the kernel takes it at one moment, while the sandbox runs, and it
shares all blocks that are the same. A new layer begins as a snapshot of a saved state.

A sandbox, its checkpoints and the layers that it had before are one account of the storage, with one limit. What a fork
took over from another's state is not counted there, so it is subtracted from the limit: a sandbox and all that it came
from never hold more than the limit allows.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal

from atoll import workers
from atoll.checkpoint import Change, Checkpoint, Snapshot
from atoll.engines.linux import host_view, identity, overlay_diff
from atoll.engines.linux.oci import transfer
from atoll.engines.linux.oci.places import Places
from atoll.engines.linux.oci.record import Record
from atoll.engines.linux.oci.saved import LEASE, Base, Saved, SavedStates
from atoll.engines.local.states import checked_name, checked_snapshot
from atoll.engines.local.waiting import finish
from atoll.errors import (
    CheckpointNotFoundError,
    ConflictError,
    EngineError,
    ImageNotFoundError,
    SandboxResourceError,
    SnapshotNotFoundError,
)
from atoll.images import Image, ImageConfig, Kind, tree
from atoll.images.work import Work
from atoll.storage import Layer
from atoll.workers import Cancellation

SNAPSHOT = "snapshot:"
Dump = Callable[[Path], AbstractAsyncContextManager[None]]
MOST_CHECKPOINTS = 1000
_SMALLEST_LIMIT = 64 << 10


class Checkpoints:
    def __init__(self, places: Places) -> None:
        self._places = places
        self.states = SavedStates(places.data / "saved")

    # --- checkpoints -----------------------------------------------------------------------------------------------

    async def make(self, record: Record, name: str, made_by: str, dump: Dump | None = None) -> Checkpoint:
        """`dump` writes the memory to a directory, and holds still what runs as long as its context lasts."""
        if name:
            checked_name(name)
        return (await finish(self._make(record, name, made_by, dump))).as_checkpoint()

    def of(self, sandbox_id: str) -> list[Checkpoint]:
        return [saved.as_checkpoint() for saved in self.states.of(sandbox_id) if saved.kind == "checkpoint"]

    def find(self, sandbox_id: str, checkpoint: str) -> Saved:
        """By id, or the newest of a name."""
        for saved in reversed(self.states.of(sandbox_id)):
            if checkpoint and saved.kind == "checkpoint" and checkpoint in (saved.id, saved.name):
                return saved
        raise CheckpointNotFoundError(
            f"sandbox '{sandbox_id}' has no checkpoint {checkpoint[:80]!r}", hint="`checkpoints()` lists what there is."
        )

    async def delete(self, sandbox_id: str, checkpoint: str) -> None:
        with contextlib.suppress(CheckpointNotFoundError):
            saved = await workers.run(workers.ENGINE, self.find, sandbox_id, checkpoint)
            await finish(workers.run(workers.ENGINE, self._delete, saved.id))
            if saved.memory and (record := self._places.records.read(sandbox_id)) is not None:
                await finish(workers.run(workers.ENGINE, self.set_limit, record))

    async def diff(self, record: Record, old: str, new: str | None, *, text: bool) -> list[Change]:
        """Cancelling ends the comparison at its next step, and removes what it made."""
        return await workers.run_cancellable(
            workers.COMPARISON, lambda cancellation: self._diff(record, old, new, text, cancellation)
        )

    def set_limit(self, record: Record) -> None:
        """What its files may take: its limit without what the memory in its checkpoints takes, which lies elsewhere."""
        most = limit_for(record, self._memory_kept(record.sandbox_id))
        self._places.layers.limit(record.sandbox_id, most)

    # --- where new sandboxes start ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def branching(self, record: Record, dump: Dump | None) -> AsyncIterator[Saved]:
        """The state of this moment, for new sandboxes: it is listed nowhere and goes with the last of them."""
        made: list[Saved] = []

        async def make() -> None:
            made.append(await self._make(record, "", "fork", dump, kind="origin"))

        try:
            await finish(make())  # which is done to its end also when we are cancelled
            yield made[0]
        finally:
            for saved in made:
                await finish(workers.run(workers.ENGINE, self._release, saved.id))

    def begin_with(self, sandbox_id: str, source: Saved) -> None:
        """A new sandbox can go back to what it began with, whatever happens to the source."""
        if not self.states.use(source.id, sandbox_id):
            raise CheckpointNotFoundError(f"the state {source.name or source.id!r} was just deleted")

    def snapshot_named(self, image: str) -> Saved:
        """What `snapshot:NAME` means. Raises ImageNotFoundError."""
        saved = self.states.snapshot(image.removeprefix(SNAPSHOT))
        if saved is None:
            raise SnapshotNotFoundError(
                f"there is no snapshot {image.removeprefix(SNAPSHOT)[:80]!r}", hint="'atoll snapshot ls' lists them."
            )
        return saved

    # --- snapshots -------------------------------------------------------------------------------------------------

    async def keep(self, record: Record, name: str, source: Saved | None, *, memory: bool = False) -> Snapshot:
        """Under a name: a saved state, with its memory if that is wanted, or the files of now."""
        checked_snapshot(name)
        return (await finish(workers.run(workers.ENGINE, self._keep, record, name, source, memory))).as_snapshot()

    def snapshots(self) -> list[Snapshot]:
        return [saved.as_snapshot() for saved in self.states.all() if saved.kind == "snapshot"]

    async def delete_snapshot(self, name: str) -> None:
        saved = await workers.run(workers.ENGINE, self.states.snapshot, name)
        if saved is not None:
            await finish(workers.run(workers.ENGINE, self._delete, saved.id))

    async def export(self, saved: Saved, file: Path, memory_version: str = "") -> None:
        memory = transfer.Memory(self._places.memory(saved.id), memory_version) if saved.memory else None
        await finish(workers.run(workers.TRANSFER, transfer.write, self._places.layers, saved, file, memory))

    async def take_in(
        self, file: Path, name: str, most_bytes: int | None = None, memory_version: str | None = None
    ) -> Snapshot:
        """Its memory too, if that is of this version. None: without."""
        checked_snapshot(name)
        return (
            await finish(workers.run(workers.TRANSFER, self._take_in, file, name, most_bytes, memory_version))
        ).as_snapshot()

    # --- the end ---------------------------------------------------------------------------------------------------

    def delete_all(self, sandbox_id: str) -> None:
        tree.remove(self._places.memory(sandbox_id))
        for saved in self.states.of(sandbox_id):
            self._delete(saved.id)
        for saved_id in self.states.used_by(sandbox_id):
            self._leave(saved_id, sandbox_id)

    def collect(self) -> list[str]:
        """Remove what a process that died left, and what belonged to sandboxes that are gone.

        Others make sandboxes and states meanwhile. Each writes down what it will make before it makes that, so a thing
        is left over only if nothing is written down of it after it was seen.
        """
        removed, lives = [], self._places.records.exists
        for saved in self.states.all():
            if saved.sandbox_id and not lives(saved.sandbox_id):
                self._delete(saved.id)
                removed.append(f"checkpoint {saved.id} of {saved.sandbox_id}")
        for saved_id in self.states.unused(lives):
            self._remove(saved_id)
        for saved_id in self._places.layers.list_saved():
            if not self.states.is_known(saved_id):
                self._places.layers.delete_saved(saved_id)
                removed.append(f"half a checkpoint, {saved_id}")
        for lease in self._places.images.store.leases():
            if lease.startswith(LEASE) and not self.states.is_known(lease.removeprefix(LEASE)):
                self._places.images.store.release(lease)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._places.memory("x").parent):
                if not self.states.is_known(name) and not lives(name):
                    tree.remove(self._places.memory(name))
        self.states.sweep()
        return removed

    # --- its parts, which block --------------------------------------------------------------------------------------

    async def _make(
        self,
        record: Record,
        name: str,
        made_by: str,
        dump: Dump | None,
        kind: Literal["checkpoint", "origin"] = "checkpoint",
    ) -> Saved:
        if dump is None:
            return await workers.run(workers.ENGINE, self._save, record, name, made_by, kind)
        new = contextlib.ExitStack()
        saved_id = new.enter_context(self._new())
        try:
            async with dump(self._places.memory(saved_id)):
                await workers.run(workers.ENGINE, self._places.layers.save, record.sandbox_id, saved_id)
            return await workers.run(workers.ENGINE, self._written, record, saved_id, name, made_by, kind, memory=True)
        finally:
            await workers.run(workers.ENGINE, new.close)  # which may have much to remove

    def _save(self, record: Record, name: str, made_by: str, kind: Literal["checkpoint", "origin"]) -> Saved:
        with self._new() as saved_id:
            self._places.layers.save(record.sandbox_id, saved_id)
            return self._written(record, saved_id, name, made_by, kind, memory=False)

    def _written(
        self,
        record: Record,
        saved_id: str,
        name: str,
        made_by: str,
        kind: Literal["checkpoint", "origin"],
        *,
        memory: bool,
    ) -> Saved:
        if kind == "origin":
            self.states.hold(saved_id)
        elif len(self.states.of(record.sandbox_id)) >= MOST_CHECKPOINTS:
            raise SandboxResourceError(
                f"sandbox '{record.sandbox_id}' has {MOST_CHECKPOINTS} checkpoints", hint="Delete some first."
            )
        memory_bytes = self._memory_bytes(record, saved_id, kind) if memory else 0
        saved = self._write(
            Saved(
                id=saved_id,
                kind=kind,
                sandbox_id=record.sandbox_id if kind == "checkpoint" else "",
                name=name,
                created_at=time.time(),
                parent=self._places.records.position(record),
                made_by=made_by,
                size_bytes=self._size(record),
                base=self._base(record),
                memory=memory,
                memory_bytes=memory_bytes,
                runtime=record.runtime,
            )
        )
        if memory and kind == "checkpoint":
            self.set_limit(record)
        return saved

    def _memory_bytes(self, record: Record, saved_id: str, kind: Literal["checkpoint", "origin"]) -> int:
        """Raises SandboxResourceError if it is more than the sandbox's disk has left."""
        size = _bytes_in(self._places.memory(saved_id))
        used = self._places.layers.account_usage(record.sandbox_id)
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
        return sum(saved.memory_bytes for saved in self.states.of(sandbox_id) if saved.kind == "checkpoint")

    def _keep(self, record: Record, name: str, source: Saved | None, memory: bool) -> Saved:
        self._refuse_taken(name)
        with self._new() as saved_id:
            if source is not None and memory:
                _link(self._places.memory(source.id), self._places.memory(saved_id))
            if source is not None:
                self._places.layers.copy_saved(source.id, saved_id)
            else:
                self._places.layers.save(record.sandbox_id, saved_id)
            return self._write(
                Saved(
                    id=saved_id,
                    kind="snapshot",
                    name=name,
                    created_at=time.time(),
                    source=record.sandbox_id,
                    size_bytes=source.size_bytes if source is not None else self._size(record),
                    base=source.base if source is not None else self._base(record),
                    memory=memory,
                    memory_bytes=_bytes_in(self._places.memory(saved_id)) if memory else 0,
                    runtime=record.runtime if memory else "",
                )
            )

    def _take_in(self, file: Path, name: str, most_bytes: int | None, memory_version: str | None) -> Saved:
        self._refuse_taken(name)
        with transfer.opened(file, most_bytes) as parcel, self._new() as saved_id:
            memory = False
            if parcel.has_memory and memory_version is not None:
                memory = True
                parcel.unpack_memory(self._places.memory(saved_id), memory_version)
            if parcel.base.digest and not self._places.images.store.root(parcel.base.digest).is_dir():
                raise ImageNotFoundError(
                    f"the snapshot was made from the image {parcel.base.image!r} ({parcel.base.digest}), "
                    "which is not on this machine",
                    hint="Get that image first, in the same version.",
                )
            self._places.layers.make_saved(saved_id, parcel.unpack)
            return self._write(
                Saved(
                    id=saved_id,
                    kind="snapshot",
                    name=name,
                    created_at=time.time(),
                    source=file.name,
                    size_bytes=parcel.size_bytes,
                    base=parcel.base,
                    memory=memory,
                    memory_bytes=_bytes_in(self._places.memory(saved_id)) if memory else 0,
                    runtime="runsc" if memory else "",
                )
            )

    def _refuse_taken(self, name: str) -> None:
        if self.states.snapshot(name) is not None:
            raise ConflictError(
                f"there is already a snapshot {name.rpartition('/')[2]!r}",
                hint="Delete it first, or choose another name.",
            )

    def _diff(self, record: Record, old: str, new: str | None, text: bool, cancellation: Cancellation) -> list[Change]:
        layers = self._places.layers
        before = self.find(record.sandbox_id, old)
        inner, lowers = self._below(before.base)
        with contextlib.ExitStack() as held:
            if new is None:
                # Not the layer itself: it is in use.
                now = held.enter_context(self._new())
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
        """The name of the root directory in a layer, and the roots below it."""
        if not base.digest:
            return host_view.INNER, [host_view.skeleton(self._places.data / "host") / host_view.INNER]
        root = self._places.images.store.root(base.digest)
        return root.name, [root]

    def _base(self, record: Record) -> Base:
        if record.base is not None:
            return record.base
        digest = self._places.images.store.leased_by(record.sandbox_id)
        image = self._places.images.store.of_digest(digest) if digest else None
        return Base(image=record.spec.image, digest=digest, env=image.config.env if image is not None else {})

    def _size(self, record: Record) -> int:
        return record.inherited_bytes + (self._places.layers.usage(record.sandbox_id) or 0)

    @contextmanager
    def _new(self) -> Iterator[str]:
        """An id. If it did not become a state at the end, nothing of it is left."""
        saved_id = self.states.new_id()
        try:
            yield saved_id
        finally:
            if self.states.read(saved_id) is None:
                self.states.release(saved_id)
                self._remove(saved_id)
            self.states.abandon(saved_id)

    def _write(self, saved: Saved) -> Saved:
        if saved.base.digest and saved.kind == "snapshot":  # the others are there only as long as their sandbox
            self._places.images.store.lease(LEASE + saved.id, saved.base.digest, Work())
        if saved.kind != "snapshot":
            self.states.write(saved)
            return saved
        with self.states.locked():
            self._refuse_taken(saved.name)
            self.states.write(saved)
        return saved

    def _delete(self, saved_id: str) -> None:
        if self.states.forget(saved_id):
            self._remove(saved_id)

    def _release(self, saved_id: str) -> None:
        if self.states.release(saved_id):
            self._remove(saved_id)

    def _leave(self, saved_id: str, sandbox_id: str) -> None:
        if self.states.leave(saved_id, sandbox_id):
            self._remove(saved_id)

    def _remove(self, saved_id: str) -> None:
        tree.remove(self._places.memory(saved_id))
        self._places.layers.delete_saved(saved_id)
        self._places.images.store.release(LEASE + saved_id)


def _link(source: Path, target: Path) -> None:
    """Files that nobody changes any more, once more under another name."""
    target.mkdir(mode=0o700, parents=True)
    for name in os.listdir(source):
        os.link(source / name, target / name)


def _bytes_in(directory: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(directory))


# --- for those who make sandboxes ------------------------------------------------------------------------------------


async def acquire(places: Places, record: Record) -> Image | None:
    """The image that a sandbox stands on; None for the host's own. What a state was made on is taken by its digest."""
    base = record.base
    if base is None:
        if record.spec.image == "host":
            return None
        return await places.images.acquire(record.spec.image, record.sandbox_id)
    if not base.digest:
        return None
    root = await places.images.lease(record.sandbox_id, base.digest)
    return Image(base.image, Kind.TAR, base.digest, root, ImageConfig(env=base.env))


def layer_for(places: Places, record: Record, below: Path) -> Layer:
    """Its writable layer over this root: a new one, or the one it has when it is only started again."""
    if record.restoring is not None:
        layer = places.layers.open_layer(record.sandbox_id)
    else:
        layer = places.layers.create_layer(record.sandbox_id, limit_for(record), record.origin)
    if record.memory == record.sandbox_id:
        return layer  # it only slept
    if record.restoring not in (None, "") or record.origin is not None:
        own = record.restoring not in (None, record.origin)  # its own checkpoints are its own already
        identity.freshen(layer.path / "upper" / below.name, below, record.sandbox_id, own=own)
    return layer


def limit_for(record: Record, elsewhere: int = 0) -> int | None:
    wanted = record.limits.disk_bytes
    return None if wanted is None else max(_SMALLEST_LIMIT, wanted - record.origin_bytes - elsewhere)
