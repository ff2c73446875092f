"""Writable layers as subvolumes of btrfs, each with a quota.

If the data directory is on btrfs, its own file system is the pool. Otherwise root makes one: a sparse file, mounted
over a loop device at `<data>/pool`. The mount is the host's, so it survives a restart of ours; it is made when the
first layer is needed and taken down when the last process of ours lets go and no layer is left. The loop device
frees itself with the mount.

A sandbox has one account: its layer, all that is saved of it, and the layers that it had before, as long as anything
of them is kept, are counted together, and the limit is for their sum. An extent counts for the subvolume that wrote it
until the last reference to it is gone, so deleting a state gives back exactly what nothing else holds. Beside each
layer lie `.<id>.account`, a link that names the account, and `.<id>.kept` once something was saved of the layer that is
there now.

btrfs counts bytes for each subvolume and refuses a write over the limit at once. It does not count inodes, so a
limit on inodes is not offered; an empty file costs metadata, which the byte limit counts, so even a flood of them
ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import EngineError, EngineUnavailableError
from atoll.images import tree
from atoll.storage import btrfs
from atoll.storage.layers import Layer, Layers, PlainLayers, checked, make_parts, names_in

_PROGRAM_S = 60.0
_SMALLEST_POOL = 256 << 20
_NEARLY_FULL = 0.98
_ROOM_TO_START = 4 << 20
_ACCOUNT = ".account"
_MOUNT_OPTIONS = "loop,nodev,nosuid,noatime,discard=async"


def open_layers(data_dir: Path) -> Layers:
    """The best that works here: a quota where root can have one, plain directories otherwise."""
    if os.geteuid() == 0 and (btrfs.is_btrfs(_existing(data_dir)) or _can_make_pool()):
        return BtrfsLayers(data_dir)
    return PlainLayers(data_dir / "layers")


def _can_make_pool() -> bool:
    return (
        shutil.which("mkfs.btrfs") is not None and Path("/dev/loop-control").exists() and "\tbtrfs\n" in _filesystems()
    )


def _filesystems() -> str:
    try:
        return Path("/proc/filesystems").read_text()
    except OSError:
        return ""


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


@dataclass(frozen=True, slots=True)
class BtrfsLayers:
    """An implementation of `Layers`."""

    data_dir: Path
    enforces_disk: bool = True
    can_save: bool = True

    def create_layer(self, layer_id: str, disk_bytes: int | None, origin: str | None = None) -> Layer:
        with self._pool() as directory:
            path = directory / checked(layer_id)
            if path.exists():
                raise EngineError(f"there is already a layer '{layer_id}'")
            self._forget_account(directory, layer_id)
            account = self._open_account(directory, layer_id, disk_bytes) if disk_bytes is not None else None
            self._fill(path, origin, account)
        return Layer(layer_id, path)

    def replace_layer(self, layer_id: str, disk_bytes: int | None, origin: str | None) -> _Replacement:
        with self._pool() as directory:
            draft = directory / f".{checked(layer_id)}.next"
            self._remove(draft)
            account = self._account(directory, layer_id)
            if account is None and disk_bytes is not None:  # made by an earlier version
                account = self._adopt(directory, layer_id, disk_bytes)
            # What is done to it before it is one of the account's cannot be refused for want of space.
            self._fill(draft, origin, None)
            if account is not None:
                self._make_room(directory, account)
                btrfs.assign(draft, account, counted=True)
        return _Replacement(self, layer_id)

    def limit(self, layer_id: str, disk_bytes: int | None) -> None:
        with self._pool() as directory:
            account = self._account(directory, checked(layer_id))
            if account is not None and disk_bytes is not None:
                btrfs.limit_account(directory, account, disk_bytes)

    def open_layer(self, layer_id: str) -> Layer:
        with self._pool() as directory:
            path = directory / checked(layer_id)
            if not path.is_dir():
                raise EngineError(f"there is no layer '{layer_id}'")
            try:
                _forget_work(path)
            except OSError as error:
                raise EngineError(f"the layer '{layer_id}' cannot be used again: {error}") from error
            return Layer(layer_id, path)

    def save(self, layer_id: str, saved_id: str) -> None:
        with self._pool() as directory:
            (directory / f".{checked(layer_id)}.kept").touch()
            self._keep(directory / layer_id, saved_id, self._account(directory, layer_id))

    def copy_saved(self, saved_id: str, new_id: str) -> None:
        with self._pool():
            self._keep(self._saved / checked(saved_id), new_id)

    def make_saved(self, saved_id: str, fill: Callable[[Path], None]) -> None:
        with self._pool():
            self._saved.mkdir(mode=0o700, exist_ok=True)
            draft = self._saved / f".{checked(saved_id)}.{os.getpid()}"
            self._remove(draft)
            try:
                self._fill(draft, None)
                fill(draft)
                os.rename(draft, self._saved / saved_id)
            except OSError as error:
                raise EngineError(f"a state could not be kept: {error}") from error
            finally:
                self._remove(draft)

    def delete_saved(self, saved_id: str) -> None:
        checked(saved_id)
        if self._is_there():
            with self._pool() as directory:
                self._remove(self._saved / saved_id)
                btrfs.free_soon(directory)

    def list_saved(self) -> list[str]:
        if not self._is_there():
            return []
        with self._pool():
            return names_in(self._saved)

    @contextmanager
    def looking(self, name: str, *, saved: bool) -> Iterator[Path]:
        with self._pool() as directory:
            yield (self._saved if saved else directory) / checked(name)

    def _keep(self, source: Path, saved_id: str, account: int | None = None) -> None:
        try:
            self._saved.mkdir(mode=0o700, exist_ok=True)
            btrfs.snapshot(source, self._saved / checked(saved_id), read_only=True, account=account)
        except OSError as error:
            raise EngineError(f"the state of '{source.name}' could not be kept: {error}") from error

    def _fill(self, path: Path, origin: str | None, account: int | None = None) -> None:
        """Make a subvolume that can be a layer, whole or not at all."""
        try:
            if origin is None:
                btrfs.create_subvolume(path, account)
            else:
                btrfs.snapshot(self._saved / checked(origin), path, account=account)
            path.chmod(0o700)
            if origin is not None:
                _forget_work(path)
            else:
                make_parts(path)
        except FileNotFoundError as error:
            self._remove(path)
            raise EngineError(f"there is nothing saved as '{origin}'") from error
        except OSError as error:
            self._remove(path)
            raise EngineError(f"a writable layer could not be made: {error}") from error

    def delete_layer(self, layer_id: str) -> None:
        checked(layer_id)
        if not self._is_there():
            return
        with self._pool() as directory:
            self._remove(directory / layer_id)
            self._remove(directory / f".{layer_id}.next")
            self._forget_account(directory, layer_id)

    def usage(self, layer_id: str) -> int | None:
        quota = self._quota(layer_id)
        return quota.used_bytes if quota is not None else None

    def account_usage(self, layer_id: str) -> int | None:
        account = self._account(self._directory, checked(layer_id))
        quota = btrfs.account_quota(self._directory, account) if account is not None else None
        return quota.used_bytes if quota is not None else None

    def sweep(self) -> None:
        if not self._directory.is_dir():
            return
        with self._pool() as directory:
            btrfs.forget_empty_quotas(directory)
            # Listed first: whatever is there by then was named before.
            there = btrfs.accounts(directory)
            names = [name for name in os.listdir(directory) if name.startswith(".") and name.endswith(_ACCOUNT)]
            named = {self._account(directory, name[1 : -len(_ACCOUNT)]) for name in names}
            for number in there:
                if number not in named:
                    btrfs.remove_account(directory, number)

    def is_full(self, layer_id: str) -> bool:
        account = self._account(self._directory, checked(layer_id))
        quota = self._quota(layer_id) if account is None else btrfs.account_quota(self._directory, account)
        if quota is None or quota.limit_bytes is None:
            return False
        # A write is refused as a whole, so a little may be left.
        return quota.used_bytes >= quota.limit_bytes * _NEARLY_FULL

    def _quota(self, layer_id: str) -> btrfs.Quota | None:
        try:
            return btrfs.quota(self._directory / checked(layer_id))
        except OSError:
            return None

    def list(self) -> list[str]:
        if not self._is_there():
            return []
        with self._pool() as directory:
            return names_in(directory)

    def close(self) -> None:
        """Unmount a pool that nobody uses. Another process that needs it mounts it again, and finds what was saved."""
        if self._on_btrfs or not (os.path.ismount(self._mount_point) or self._draft.exists()):
            return
        with suppress(BlockingIOError), self._lock(exclusive=True, wait=False) as lock:
            self._draft.unlink(missing_ok=True)  # whoever was making it holds no lock any more, so is dead
            if os.path.ismount(self._mount_point) and not names_in(self._directory):
                with suppress(EngineUnavailableError):  # somebody looks into it just now
                    _run(lock, "umount", str(self._mount_point))

    # --- its parts -------------------------------------------------------------------------------------------------

    @property
    def _on_btrfs(self) -> bool:
        return not (self.data_dir / "pool.btrfs").exists() and btrfs.is_btrfs(_existing(self.data_dir))

    @property
    def _mount_point(self) -> Path:
        return self.data_dir / "pool"

    @property
    def _draft(self) -> Path:
        return self.data_dir / ".pool.btrfs.draft"

    @property
    def _directory(self) -> Path:
        return self.data_dir / "layers" if self._on_btrfs else self._mount_point / "layers"

    @property
    def _saved(self) -> Path:
        return self._directory.with_name("saved")

    def _account(self, directory: Path, layer_id: str) -> int | None:
        """The number of its account. None: it has none."""
        try:
            return int(os.readlink(f"{directory}/.{layer_id}{_ACCOUNT}"))
        except (OSError, ValueError):
            return None

    def _open_account(self, directory: Path, layer_id: str, disk_bytes: int) -> int:
        # Random, so nobody has to remember which numbers were used. Named before it is there, so that another process
        # that sweeps does not take it for a leftover.
        number = int.from_bytes(os.urandom(5)) + 1
        try:
            os.symlink(str(number), f"{directory}/.{layer_id}{_ACCOUNT}")
            btrfs.create_account(directory, number)
            btrfs.limit_account(directory, number, disk_bytes)
        except OSError as error:
            raise EngineError(f"the disk limit of '{layer_id}' cannot be set: {error}") from error
        return number

    def _adopt(self, directory: Path, layer_id: str, disk_bytes: int) -> int:
        """An account for a layer that has none yet, with all that the layer holds."""
        (directory / f".{layer_id}.kept").touch()
        number = self._open_account(directory, layer_id, disk_bytes)
        btrfs.assign(directory / layer_id, number, counted=True)
        return number

    def _make_room(self, directory: Path, account: int) -> None:
        quota = btrfs.account_quota(directory, account)
        if quota is not None and quota.limit_bytes is not None:
            most = max(quota.limit_bytes, quota.used_bytes + _ROOM_TO_START)
            btrfs.limit_account(directory, account, most)

    def _forget_account(self, directory: Path, layer_id: str) -> None:
        """What still counts in it (blocks that forks hold, or that the kernel has not freed yet) is nobody's; `sweep`
        removes it in the end."""
        account = self._account(directory, layer_id)
        for name in (_ACCOUNT, ".kept"):
            (directory / f".{layer_id}{name}").unlink(missing_ok=True)
        if account is not None:
            btrfs.remove_account(directory, account)

    def _is_there(self) -> bool:
        return self._directory.is_dir() or (self.data_dir / "pool.btrfs").exists()

    def _discard(self, directory: Path, layer_id: str, old: Path) -> None:
        """Remove what a layer was before. If nothing was saved of it, its space is free at once, though the kernel
        takes its time; else the kernel knows what is still held."""
        account, kept = self._account(directory, layer_id), directory / f".{layer_id}.kept"
        if account is not None and not kept.exists():
            btrfs.assign(old, account, counted=False)
        self._remove(old)
        kept.unlink(missing_ok=True)
        btrfs.free_soon(directory)

    def _remove(self, path: Path) -> None:
        try:
            if btrfs.is_subvolume(path):
                btrfs.delete_subvolume(path)
            elif path.exists():
                tree.remove(path)
        except FileNotFoundError:
            if os.path.lexists(path):
                raise
            # Somebody else removed it meanwhile.
        except OSError as error:
            raise EngineError(f"the layer '{path.name}' could not be removed: {error}") from error

    @contextmanager
    def _pool(self) -> Iterator[Path]:
        """The directory of the layers, mounted as long as we hold the lock."""
        with self._lock(exclusive=False):
            if self._directory.is_dir():
                yield self._directory
                return
        with self._lock(exclusive=True) as lock:
            if not self._directory.is_dir():
                self._make(lock)
            yield self._directory

    @contextmanager
    def _lock(self, *, exclusive: bool, wait: bool = True) -> Iterator[int]:
        """Held by its descriptor, which the programs that we run inherit: if we die, it is free once they end."""
        self.data_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        fd = os.open(self.data_dir / "pool.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))
            yield fd
        finally:
            os.close(fd)

    def _make(self, lock: int) -> None:
        if not self._on_btrfs:
            image = self.data_dir / "pool.btrfs"
            if not image.exists():
                self._format(lock, image)
            self._mount_point.mkdir(mode=0o700, exist_ok=True)
            if not os.path.ismount(self._mount_point):
                _run(lock, "mount", "-t", "btrfs", "-o", _MOUNT_OPTIONS, str(image), str(self._mount_point))
        try:
            btrfs.enable_quota(self._mount_point if not self._on_btrfs else self.data_dir)
        except OSError as error:
            raise EngineUnavailableError(f"quotas cannot be enabled on the pool: {error}") from error
        self._directory.mkdir(mode=0o700, exist_ok=True)

    def _format(self, lock: int, image: Path) -> None:
        """Sparse, and no larger than what is free: a full pool must not fill the disk of the host."""
        free = shutil.disk_usage(self.data_dir).free
        size = int(free * 0.8) >> 20 << 20
        if size < _SMALLEST_POOL:
            raise EngineUnavailableError(f"'{self.data_dir}' has too little free space for a pool: {free >> 20} MiB")
        draft = self._draft
        draft.unlink(missing_ok=True)
        with open(draft, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.truncate(size)
        _run(lock, "mkfs.btrfs", "--quiet", "--metadata", "single", str(draft))
        draft.rename(image)


def _forget_work(path: Path) -> None:
    """The overlay's own notes, of which one says that it must not be mounted again after a crash."""
    tree.remove(path / "work")
    (path / "work").mkdir(mode=0o700)


@dataclass(frozen=True, slots=True)
class _Replacement:
    """A subvolume beside the layer, under a name that `list` does not show; one that a crash left is made anew."""

    layers: BtrfsLayers
    layer_id: str

    def commit(self) -> None:
        with self.layers._pool() as directory:
            draft = directory / f".{self.layer_id}.next"
            try:
                btrfs.exchange(draft, directory / self.layer_id)
            except OSError as error:
                raise EngineError(f"the layer '{self.layer_id}' could not be replaced: {error}") from error
            self.layers._discard(directory, self.layer_id, draft)

    def discard(self) -> None:
        with self.layers._pool() as directory:
            self.layers._remove(directory / f".{self.layer_id}.next")


def _run(lock: int, *argv: str) -> None:
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            timeout=_PROGRAM_S,
            check=False,
            text=True,
            errors="replace",
            pass_fds=(lock,),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineUnavailableError(f"'{argv[0]}' failed: {error}") from error
    if done.returncode != 0:
        raise EngineUnavailableError(f"'{argv[0]}' failed: {done.stderr.strip()[-500:] or done.returncode}")
