"""Named volumes: directories of a user that outlive the sandboxes which mount them.

A volume is a subvolume of btrfs in the storage pool, with a size limit that the kernel enforces. Ids of its files on
disk are those inside sandboxes, as in writable layers, so that a file means the same in every sandbox. Only root of the
host can reach the pool, and volumes are mounted `nosuid` and `nodev`, so no file of them can do harm on the host.

A copy shares all equal blocks with its source. Its size includes what it had at first. As sandboxes could share blocks
between volumes themselves, the volumes of an owner also have an account, which counts a block until nothing uses it.
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from atoll.errors import ConflictError, EngineError, SpecError, VolumeNotFoundError
from atoll.resources import SMALLEST_VOLUME_BYTES, VolumeSizes
from atoll.storage import btrfs
from atoll.storage.storage_pool import StoragePool
from atoll.storage.volume_folder import VolumeFolder, remove_subvolume
from atoll.storage.volume_rules import VolumeRecord, checked_name

_SWEEP_S = 5.0
_NEARLY_FULL = 0.98
_SHOWN = 10
_MODE = 0o1777
"""The mode of a new volume: any user of the image may make files there, as in /tmp."""


@dataclass(frozen=True, slots=True)
class Volumes:
    """The named volumes of an installation, of all owners. The methods block, and may be called from many threads and
    processes at once. Changes of one owner's volumes happen one after another."""

    data_dir: Path
    sizes: VolumeSizes = field(default_factory=VolumeSizes)
    exists: Callable[[str], bool] = lambda _: True
    """Returns whether there is a sandbox of this id, in whatever state."""

    # --- for sandboxes ----------------------------------------------------------------------------------------------

    def use(self, owner: str, name: str, sandbox_id: str, *, read_only: bool) -> Path:
        """Return the directory to mount in a sandbox, whose record exists already. From now on the volume cannot be
        removed before the sandbox. A volume that does not exist is made. May be repeated."""
        with self._alone(owner) as folder:
            record = folder.read(checked_name(name)) or self._make(folder, owner, name, self.sizes.checked(None))
            if record.read_only and not read_only:
                raise SpecError(
                    f"the volume '{name}' is a read-only snapshot",
                    hint=f"Mount it read-only ('{name}:/path:ro'), or restore it into another volume.",
                )
            folder.add_user(record, sandbox_id)
            folder.touch(record)
            return folder.data(record)

    def release(self, owner: str, name: str, sandbox_id: str) -> None:
        """Forget that a sandbox uses a volume. May be repeated."""
        if not self._pool.exists():
            return
        with self._pool.opened():
            folder = self._folder(owner)
            record = folder.read(checked_name(name))
            if record is not None:
                folder.remove_user(record.id, sandbox_id)

    def is_full(self, owner: str, name: str) -> bool:
        """Return whether the volume's size is reached. This is quick, like `Layers.is_full`."""
        folder = self._folder(owner)
        record = folder.read(name)
        if record is None:
            return False
        try:
            quota = btrfs.quota(folder.data(record))
        except OSError:
            return False
        if quota is None or quota.limit_bytes is None:
            return False
        return quota.used_bytes >= quota.limit_bytes * _NEARLY_FULL

    # --- for users --------------------------------------------------------------------------------------------------

    def create(self, owner: str, name: str, size_bytes: int | None = None) -> VolumeRecord:
        """Make an empty volume. Raises ConflictError if there is one of that name."""
        size = self.sizes.checked(size_bytes)
        with self._alone(owner) as folder:
            _refuse_taken(folder, name)
            return self._make(folder, owner, name, size)

    def ensure(self, owner: str, name: str, size_bytes: int | None = None) -> VolumeRecord:
        """Return the volume of this name, which is made if there is none. `size_bytes` is for a new one."""
        size = self.sizes.checked(size_bytes)
        with self._alone(owner) as folder:
            record = folder.read(checked_name(name)) or self._make(folder, owner, name, size)
            folder.touch(record)
            return record

    def copy(
        self, owner: str, source: str, name: str, *, size_bytes: int | None = None, read_only: bool = False
    ) -> VolumeRecord:
        """Make a volume with the present content of another one of the same owner, which may be in use. The content is
        that of one moment, and its blocks are shared. Raises VolumeNotFoundError, ConflictError."""
        with self._alone(owner) as folder:
            found = _need(folder, source)
            _refuse_taken(folder, name)
            size = found.size_bytes if size_bytes is None else self.sizes.checked(size_bytes)
            wanted = found.model_copy(update={"name": name, "size_bytes": size, "created_at": time.time()})
            return self._copy(folder, found, wanted, read_only)

    def restore(self, owner: str, name: str, source: str) -> VolumeRecord:
        """Replace the content of a volume by the present content of another one, atomically. Raises ConflictError if a
        sandbox has it mounted."""
        with self._alone(owner) as folder:
            record, found = _need(folder, name), _need(folder, source)
            self._refuse_used(folder, record)
            if record.name == found.name:
                raise SpecError("a volume cannot be restored from itself", hint="Name a snapshot of it.")
            made = self._copy(folder, found, record, record.read_only)
            folder.remove_data(record)
            btrfs.free_soon(folder.path)
            return made

    def get(self, owner: str, name: str) -> VolumeRecord:
        """Return a volume. Raises VolumeNotFoundError."""
        with self._looking() as there:
            return _need(self._folder(owner) if there else None, name)

    def list(self, owner: str | None = "", *, caches: bool = False) -> builtins.list[VolumeRecord]:
        """Return the volumes of an owner, or (None) of all, oldest first; with `caches` those of builds instead."""
        with self._looking():
            folders = self._folders() if owner is None else [self._folder(owner)]
            found = [record for folder in folders for record in folder.read_all() if record.is_cache == caches]
        return sorted(found, key=lambda record: record.created_at)

    def users(self, record: VolumeRecord) -> builtins.list[str]:
        """Return the ids of the sandboxes that mount the volume."""
        with self._looking():
            return [each for each in self._folder(record.owner).users(record) if self.exists(each)]

    def used_bytes(self, record: VolumeRecord) -> int:
        """Return how much of its size the volume uses."""
        with self._looking():
            try:
                quota = btrfs.quota(self._folder(record.owner).data(record))
            except OSError:
                quota = None
        return record.inherited_bytes + (quota.used_bytes if quota is not None else 0)

    def remove(self, owner: str, name: str) -> None:
        """Remove a volume with everything in it. May be repeated. Raises ConflictError, which names the sandboxes, if
        any has it mounted."""
        if not self._pool.exists():
            return
        with self._alone(owner) as folder:
            record = folder.read(checked_name(name))
            if record is not None:
                self._refuse_used(folder, record)
                self._remove(folder, record)

    def evict_caches(self, owner: str, keep_bytes: int, keep: int = 100) -> int:
        """Remove caches of builds that no sandbox uses, the least recently used first, until there are at most `keep`
        and they take at most `keep_bytes`. Return how many bytes were freed."""
        if not self._pool.exists():
            return 0
        with self._alone(owner) as folder:
            caches = [record for record in folder.read_all() if record.is_cache]
            used = {record.id: self.used_bytes(record) for record in caches}
            total, freed, left = sum(used.values()), 0, len(caches)
            for record in sorted(caches, key=folder.used_at):
                if (total - freed > keep_bytes or left > keep) and not self.users(record):
                    self._remove(folder, record)
                    freed += used[record.id]
                    left -= 1
            return freed

    def sweep(self) -> Sequence[str]:
        """Remove what killed processes left, and return what was removed. It takes a bounded time."""
        removed: builtins.list[str] = []
        until = time.monotonic() + _SWEEP_S
        if not self._pool.directory.is_dir():
            return removed
        with self._pool.opened():
            folders = self._folders()
            random.shuffle(folders)  # so that each has its turn, where there are too many for one call
            for folder in folders:
                if time.monotonic() > until:
                    break
                if not folder.looks_clean():
                    with folder.alone():
                        removed += folder.sweep()
        return removed

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _pool(self) -> StoragePool:
        return StoragePool(self.data_dir)

    @property
    def _home(self) -> Path:
        return self._pool.directory.with_name("volumes")

    def _folder(self, owner: str) -> VolumeFolder:
        return VolumeFolder(self._home / hashlib.sha256(owner.encode()).hexdigest()[:32])

    def _folders(self) -> builtins.list[VolumeFolder]:
        try:
            return [VolumeFolder(path) for path in self._home.iterdir()]
        except FileNotFoundError:
            return []

    @contextmanager
    def _looking(self) -> Iterator[bool]:
        """Keep the storage pool mounted while the block runs. Yields False if there is none."""
        if not self._pool.exists():
            yield False
            return
        with self._pool.opened():
            yield True

    @contextmanager
    def _alone(self, owner: str) -> Iterator[VolumeFolder]:
        folder = self._folder(owner)
        with self._pool.opened(), _translating():
            self._home.mkdir(mode=0o700, exist_ok=True)
            with folder.alone():
                yield folder

    def _make(self, folder: VolumeFolder, owner: str, name: str, size_bytes: int) -> VolumeRecord:
        record = VolumeRecord(
            id=uuid4().hex, name=checked_name(name), owner=owner, size_bytes=size_bytes, created_at=time.time()
        )
        path = folder.data(record)
        folder.limit_account(size_bytes)  # so that a full account does not keep a new volume from being made
        with _undone(path):
            btrfs.create_subvolume(path, folder.account())
            btrfs.limit_subvolume(path, size_bytes)
            path.chmod(_MODE)
            folder.write(record)
        return record

    def _copy(self, folder: VolumeFolder, source: VolumeRecord, wanted: VolumeRecord, read_only: bool) -> VolumeRecord:
        """Make a volume like `wanted` with the content of `source`. It replaces one of the same name."""
        made = wanted.model_copy(update={"id": uuid4().hex, "source": source.name, "read_only": read_only})
        path, original = folder.data(made), folder.data(source)
        folder.limit_account(max(wanted.size_bytes, source.size_bytes))
        with _undone(path):
            btrfs.snapshot(original, path, read_only=read_only, account=folder.account())
            # This is looked at after the snapshot, so it includes everything that the snapshot has.
            inherited = self.used_bytes(source) if btrfs.counts_shared_data_once(path) else 0
            if inherited + SMALLEST_VOLUME_BYTES > made.size_bytes and not read_only:
                raise SpecError(
                    f"{inherited:,} bytes do not fit into a volume of {made.size_bytes:,}", hint="Ask for more."
                )
            made = made.model_copy(update={"inherited_bytes": inherited, "size_bytes": max(made.size_bytes, inherited)})
            btrfs.limit_subvolume(path, max(made.size_bytes - inherited, SMALLEST_VOLUME_BYTES))
            folder.write(made)
        folder.limit_account()
        return made

    def _remove(self, folder: VolumeFolder, record: VolumeRecord) -> None:
        folder.forget(record)
        folder.remove_data(record)
        folder.limit_account()
        btrfs.free_soon(folder.path)

    def _refuse_used(self, folder: VolumeFolder, record: VolumeRecord) -> None:
        users = []
        for each in folder.users(record):
            if self.exists(each):
                users.append(each)
            else:
                folder.remove_user(record.id, each)
        if users:
            shown = ", ".join(users[:_SHOWN]) + (f" and {len(users) - _SHOWN} more" if len(users) > _SHOWN else "")
            raise ConflictError(
                f"the volume '{record.name}' is in use by {shown}", hint="Delete these sandboxes first."
            )


def _need(folder: VolumeFolder | None, name: str) -> VolumeRecord:
    record = folder.read(checked_name(name)) if folder is not None else None
    if record is None:
        raise VolumeNotFoundError(f"there is no volume '{name}'", hint="'atoll volume ls' lists yours.")
    return record


def _refuse_taken(folder: VolumeFolder, name: str) -> None:
    if folder.read(checked_name(name)) is not None:
        raise ConflictError(f"there is already a volume '{name}'", hint="Remove it first, or choose another name.")


@contextmanager
def _undone(path: Path) -> Iterator[None]:
    """Remove a new subvolume if the block fails."""
    try:
        yield
    except BaseException:
        remove_subvolume(path)
        raise


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EngineError("the disk that holds volumes is full", hint="Remove volumes or sandboxes.") from error
        raise EngineError(f"the volumes cannot be changed: {error}") from error
