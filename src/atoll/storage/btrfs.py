"""Direct system calls for btrfs, because starting the `btrfs` program for each would take longer than the call.

The numbers and structures are those of the kernel's `linux/btrfs.h`, which do not change.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

_SNAP_DESTROY = 0x5000_940F
_INO_LOOKUP = 0xD000_9412
_SNAP_CREATE = 0x5000_9417
_READ_ONLY = 2
_HERE, _EXCHANGE = -100, 2
_FS_INFO = 0x8400_941F
_QUOTA_CTL = 0xC010_9428
_SUBVOL_CREATE_V2 = 0x5000_9418
_QUOTA_RESCAN = 0x4040_942C
_START_SYNC = 0x8008_9418
_INHERIT = 4
_ACCOUNT = 1 << 48
"""The number of an account is added to this to get the id of a quota group one level above those of subvolumes."""
_QGROUP_ASSIGN = 0x4018_9429
_QGROUP_CREATE = 0x4010_942A
_QGROUP_LIMIT = 0x8030_942B
_ENABLE, _ENABLE_SIMPLE = 1, 4
_LIMIT_REFERENCED = 1
_FIRST_INODE = 256
_MAGIC = 0x9123_683E


def is_btrfs(path: Path) -> bool:
    library = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(256)
    if library.statfs(os.fsencode(path), buffer) != 0:
        return False
    return int(ctypes.c_long.from_buffer(buffer).value) & 0xFFFF_FFFF == _MAGIC


def is_subvolume(path: Path) -> bool:
    try:
        return path.lstat().st_ino == _FIRST_INODE and is_btrfs(path)
    except OSError:
        return False


def create_subvolume(path: Path, account: int | None = None) -> None:
    """Create a subvolume. With an account, everything written to the subvolume also counts there."""
    with _directory(path.parent) as fd, _inheriting(account) as (flags, size, address):
        name = os.fsencode(path.name)
        fcntl.ioctl(fd, _SUBVOL_CREATE_V2, bytearray(struct.pack("qQQQQ16x4040s", 0, 0, flags, size, address, name)))


def snapshot(source: Path, target: Path, *, read_only: bool = False, account: int | None = None) -> None:
    """Take an atomic snapshot of a subvolume. Once its data is on disk, this takes milliseconds, whatever the size."""
    name = os.fsencode(target.name)
    with _directory(source) as old, _directory(target.parent) as parent, _inheriting(account) as (flags, size, address):
        flags |= _READ_ONLY if read_only else 0
        arguments = struct.pack("qQQQQ16x4040s", old, 0, flags, size, address, name)
        fcntl.ioctl(parent, _SNAP_CREATE, bytearray(arguments))


@contextmanager
def _inheriting(account: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield the flag, size and address of the quota argument of a new subvolume in an account."""
    if account is None:
        yield 0, 0, 0
        return
    content = struct.pack("QQQQ5QQ", 0, 1, 0, 0, 0, 0, 0, 0, 0, _ACCOUNT + account)
    buffer = ctypes.create_string_buffer(content, len(content))
    yield _INHERIT, len(content), ctypes.addressof(buffer)


def exchange(one: Path, other: Path) -> None:
    """Swap two directory entries atomically."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))


def delete_subvolume(path: Path) -> None:
    """Delete a subvolume. This takes milliseconds, whatever its size; the space is freed soon after."""
    number = subvolume_id(path)
    with _directory(path.parent) as fd:
        fcntl.ioctl(fd, _SNAP_DESTROY, _volume_arguments(path.name))
        # Remove the subvolume's quota group. It may be busy until the space is freed; the kernel removes it then.
        with suppress(OSError):
            fcntl.ioctl(fd, _QGROUP_CREATE, struct.pack("QQ", 0, number))


def subvolume_id(path: Path) -> int:
    with _directory(path) as fd:
        buffer = bytearray(4096)
        struct.pack_into("QQ", buffer, 0, 0, _FIRST_INODE)
        fcntl.ioctl(fd, _INO_LOOKUP, buffer)
        return int(struct.unpack_from("Q", buffer)[0])


def enable_quota(path: Path) -> None:
    """Enable simple quotas, which cost almost nothing, or full accounting on kernels before 6.7."""
    with _directory(path) as fd:
        try:
            fcntl.ioctl(fd, _QUOTA_CTL, bytearray(struct.pack("QQ", _ENABLE_SIMPLE, 0)))
        except OSError as error:
            if error.errno == errno.EEXIST:
                return
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY):
                raise
            fcntl.ioctl(fd, _QUOTA_CTL, bytearray(struct.pack("QQ", _ENABLE, 0)))


# --- accounts: quotas one level above those of subvolumes ------------------------------------------------------------


def create_account(pool: Path, number: int) -> None:
    """Create an empty account without a limit. Raises FileExistsError."""
    with _directory(pool) as fd:
        fcntl.ioctl(fd, _QGROUP_CREATE, struct.pack("QQ", 1, _ACCOUNT + number))


def remove_account(pool: Path, number: int) -> bool:
    """Remove an account. Returns False if something still counts in it."""
    with _directory(pool) as fd:
        try:
            fcntl.ioctl(fd, _QGROUP_CREATE, struct.pack("QQ", 0, _ACCOUNT + number))
            return True
        except OSError as error:
            return error.errno == errno.ENOENT


def assign(path: Path, account: int, *, counted: bool) -> None:
    """Start or stop counting a subvolume's data in an account."""
    number = subvolume_id(path)
    with _directory(path) as fd:
        arguments = bytearray(struct.pack("QQQ", int(counted), number, _ACCOUNT + account))
        if fcntl.ioctl(fd, _QGROUP_ASSIGN, arguments) == 1:  # only full accounting requires a rescan
            with suppress(OSError):
                fcntl.ioctl(fd, _QUOTA_RESCAN, bytearray(64))


def limit_account(pool: Path, account: int, referenced_bytes: int) -> None:
    with _directory(pool) as fd:
        arguments = struct.pack("QQQQQQ", _ACCOUNT + account, _LIMIT_REFERENCED, referenced_bytes, 0, 0, 0)
        fcntl.ioctl(fd, _QGROUP_LIMIT, arguments)


def limit_subvolume(path: Path, referenced_bytes: int) -> None:
    with _directory(path) as fd:
        arguments = struct.pack("QQQQQQ", subvolume_id(path), _LIMIT_REFERENCED, referenced_bytes, 0, 0, 0)
        fcntl.ioctl(fd, _QGROUP_LIMIT, arguments)


def counts_shared_data_once(path: Path) -> bool:
    """Return whether data that subvolumes share counts only for the one that wrote it, as simple quotas do."""
    try:
        return (_quotas(path) / "mode").read_text().strip() == "squota"
    except OSError:
        return False


def free_soon(pool: Path) -> None:
    """Ask the kernel to free the space of removed subvolumes now, without waiting for it."""
    with _directory(pool) as fd, suppress(OSError):
        fcntl.ioctl(fd, _START_SYNC, bytearray(8))


@dataclass(frozen=True, slots=True)
class Quota:
    used_bytes: int
    limit_bytes: int | None


def quota(path: Path) -> Quota | None:
    """Return what the subvolume's quota counts, including space reserved for writes that are not on disk yet. None
    without quotas."""
    return _quota(_quotas(path) / f"0_{subvolume_id(path)}")


def account_quota(pool: Path, account: int) -> Quota | None:
    return _quota(_quotas(pool) / f"1_{account}")


def accounts(pool: Path) -> list[int]:
    """Return the numbers of all accounts."""
    try:
        names = os.listdir(_quotas(pool))
    except OSError:
        return []
    return [int(name.removeprefix("1_")) for name in names if name.startswith("1_")]


def forget_empty_quotas(pool: Path) -> None:
    """Remove the quota groups of removed subvolumes that hold no data any more. The kernel keeps those in use."""
    found = _quotas(pool)
    with _directory(pool) as fd, suppress(OSError):
        for name in os.listdir(found):
            number = name.removeprefix("0_")
            if (
                name != number
                and int(number) >= _FIRST_INODE
                and (held := _quota(found / name))
                and not held.used_bytes
            ):
                with suppress(OSError):
                    fcntl.ioctl(fd, _QGROUP_CREATE, struct.pack("QQ", 0, int(number)))


def _quotas(path: Path) -> Path:
    return _quotas_of(path, path.stat().st_dev)


@functools.lru_cache(64)
def _quotas_of(path: Path, device: int) -> Path:
    """Return the directory of the quota groups. It may be cached, because a mounted file system keeps its UUID."""
    with _directory(path) as fd:
        buffer = bytearray(1024)
        fcntl.ioctl(fd, _FS_INFO, buffer)
    return Path(f"/sys/fs/btrfs/{UUID(bytes=bytes(buffer[16:32]))}/qgroups")


def _quota(folder: Path) -> Quota | None:
    try:
        used, reserved, most = (
            int((folder / name).read_text()) for name in ("referenced", "rsv_data", "max_referenced")
        )
    except (OSError, ValueError):
        return None
    return Quota(used + reserved, most or None)


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _volume_arguments(name: str) -> bytearray:
    encoded = os.fsencode(name)
    if not 0 < len(encoded) < 4088:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name)
    return bytearray(struct.pack("q4088s", 0, encoded))
