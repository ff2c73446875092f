"""The btrfs file system that holds writable layers.

If the data directory is on btrfs, that file system is the storage pool. Otherwise root creates one: a sparse file,
mounted over a loop device at `<data>/pool`. It is mounted in the host's mount namespace, so it survives a restart of
Atoll. It is mounted when the first layer is needed and unmounted when the last process of Atoll closes it and no layer
is left. Unmounting also frees the loop device.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import EngineUnavailableError
from atoll.storage import btrfs
from atoll.storage.layers import names_in

_libc = ctypes.CDLL(None)
_NO_FOLLOW = 8
_PROGRAM_S = 60.0
_MIN_POOL = 256 << 20
_MOUNT_OPTIONS = "loop,nodev,nosuid,noatime,discard=async"


def can_make_pool() -> bool:
    return (
        shutil.which("mkfs.btrfs") is not None and Path("/dev/loop-control").exists() and "\tbtrfs\n" in _filesystems()
    )


def _filesystems() -> str:
    try:
        return Path("/proc/filesystems").read_text()
    except OSError:
        return ""


def existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


@dataclass(frozen=True, slots=True)
class StoragePool:
    data_dir: Path

    @property
    def _on_btrfs(self) -> bool:
        return not (self.data_dir / "pool.btrfs").exists() and btrfs.is_btrfs(existing(self.data_dir))

    @property
    def _mount_point(self) -> Path:
        return self.data_dir / "pool"

    @property
    def _draft(self) -> Path:
        return self.data_dir / ".pool.btrfs.draft"

    @property
    def directory(self) -> Path:
        return self.data_dir / "layers" if self._on_btrfs else self._mount_point / "layers"

    def exists(self) -> bool:
        return self.directory.is_dir() or (self.data_dir / "pool.btrfs").exists()

    def close(self) -> None:
        """Unmount the pool if it is not in use and has no layers. A process that needs it mounts it again."""
        if self._on_btrfs or not (os.path.ismount(self._mount_point) or self._draft.exists()):
            return
        with suppress(BlockingIOError), self._lock(exclusive=True, wait=False):
            self._draft.unlink(missing_ok=True)  # its maker no longer holds the lock, so it has died
            if os.path.ismount(self._mount_point) and not names_in(self.directory):
                _unmount(self._mount_point)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Provide the directory of the layers. It stays mounted while the context holds the lock. May be nested."""
        while True:
            with self._lock(exclusive=False):
                if self.directory.is_dir():
                    yield self.directory
                    return
            with self._lock(exclusive=True) as lock:
                if not self.directory.is_dir():
                    self._make(lock)

    @contextmanager
    def _lock(self, *, exclusive: bool, wait: bool = True) -> Iterator[int]:
        """Hold the lock of the pool. Child programs inherit its descriptor: if this process dies, the lock is free when
        they have ended."""
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
            raise EngineUnavailableError(f"quotas cannot be enabled on the storage pool: {error}") from error
        self.directory.mkdir(mode=0o700, exist_ok=True)

    def _format(self, lock: int, image: Path) -> None:
        """Create the file system in a sparse file. It is smaller than the free space, to avoid filling the disk."""
        free = shutil.disk_usage(self.data_dir).free
        size = int(free * 0.8) >> 20 << 20
        if size < _MIN_POOL:
            raise EngineUnavailableError(
                f"'{self.data_dir}' has too little free space for a storage pool: {free >> 20} MiB"
            )
        draft = self._draft
        draft.unlink(missing_ok=True)
        with open(draft, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.truncate(size)
        _run(lock, "mkfs.btrfs", "--quiet", "--metadata", "single", str(draft))
        draft.rename(image)


def _unmount(path: Path) -> None:
    """Unmount a file system unless another program has a file of it open. The kernel then frees the loop device, as
    `mount` has told it. The program `umount` would do the same and take several times as long."""
    _libc.umount2(os.fsencode(path), _NO_FOLLOW)


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
