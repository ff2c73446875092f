"""The few calls to btrfs that we need, straight to the kernel: a program started for each would cost more than the
work.

Numbers and structures are those of the kernel's `linux/btrfs.h`, which are fixed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

_SUBVOL_CREATE = 0x5000_940E
_SNAP_DESTROY = 0x5000_940F
_INO_LOOKUP = 0xD000_9412
_SNAP_CREATE = 0x5000_9417
_READ_ONLY = 2
_HERE, _EXCHANGE = -100, 2
_FS_INFO = 0x8400_941F
_QUOTA_CTL = 0xC010_9428
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


def create_subvolume(path: Path) -> None:
    with _directory(path.parent) as fd:
        fcntl.ioctl(fd, _SUBVOL_CREATE, _volume_arguments(path.name))


def snapshot(source: Path, target: Path, *, read_only: bool = False) -> None:
    """All that was written to it before, at one moment. Milliseconds, whatever the size, once that is on the disk."""
    name = os.fsencode(target.name)
    with _directory(source) as old, _directory(target.parent) as parent:
        arguments = struct.pack("qQQ32x4040s", old, 0, _READ_ONLY if read_only else 0, name)
        fcntl.ioctl(parent, _SNAP_CREATE, bytearray(arguments))


def exchange(one: Path, other: Path) -> None:
    """Swap two entries of a directory at once."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))


def delete_subvolume(path: Path) -> None:
    """Takes milliseconds whatever is inside; the space comes back soon after."""
    number = subvolume_id(path)
    with _directory(path.parent) as fd:
        fcntl.ioctl(fd, _SNAP_DESTROY, _volume_arguments(path.name))
        # The quota's own record. It may be busy until the space is given back; the kernel removes it then.
        with suppress(OSError):
            fcntl.ioctl(fd, _QGROUP_CREATE, struct.pack("QQ", 0, number))


def subvolume_id(path: Path) -> int:
    with _directory(path) as fd:
        buffer = bytearray(4096)
        struct.pack_into("QQ", buffer, 0, 0, _FIRST_INODE)
        fcntl.ioctl(fd, _INO_LOOKUP, buffer)
        return int(struct.unpack_from("Q", buffer)[0])


def enable_quota(path: Path) -> None:
    """Simple quotas, which cost next to nothing, where the kernel knows them (6.7), else full accounting."""
    with _directory(path) as fd:
        try:
            fcntl.ioctl(fd, _QUOTA_CTL, bytearray(struct.pack("QQ", _ENABLE_SIMPLE, 0)))
        except OSError as error:
            if error.errno == errno.EEXIST:
                return
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY):
                raise
            fcntl.ioctl(fd, _QUOTA_CTL, bytearray(struct.pack("QQ", _ENABLE, 0)))


def limit(path: Path, referenced_bytes: int) -> None:
    with _directory(path) as fd:
        fcntl.ioctl(fd, _QGROUP_LIMIT, struct.pack("QQQQQQ", 0, _LIMIT_REFERENCED, referenced_bytes, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Quota:
    used_bytes: int
    limit_bytes: int | None


def quota(path: Path) -> Quota | None:
    """What the subvolume's quota counts, with what is promised to writes that are not on the disk yet. None without
    quotas."""
    with _directory(path) as fd:
        buffer = bytearray(1024)
        fcntl.ioctl(fd, _FS_INFO, buffer)
    folder = Path(f"/sys/fs/btrfs/{UUID(bytes=bytes(buffer[16:32]))}/qgroups/0_{subvolume_id(path)}")
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
