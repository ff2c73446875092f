"""A directory whose paths cannot lead outside of it.

The kernel resolves every path with `openat2` and `RESOLVE_IN_ROOT`: an absolute symbolic link starts at this directory,
`..` stops at it, and magic links of /proc are refused. No separate check could differ from the use, so long names,
chains of links and unusual encodings cannot circumvent it. The last component is never followed: it is used only with
calls that take the parent's descriptor and do not follow links.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Self

from atoll.errors import ImageError
from atoll.removal import remove_tree_at

_SYS_OPENAT2 = 437  # the same on every architecture
_RESOLVE_NO_XDEV = 0x01
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_RESOLVE = _RESOLVE_NO_XDEV | _RESOLVE_NO_MAGICLINKS | _RESOLVE_IN_ROOT
_CACHED = 128
_RETRIES = 1000

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_in_root(root: int, path: bytes, flags: int) -> int:
    """Open an existing file or directory below a directory's descriptor. Raises OSError."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE)
    for _ in range(_RETRIES):
        fd = _syscall(_SYS_OPENAT2, root, path or b".", ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return int(fd)
        code = ctypes.get_errno()
        # The kernel returns EAGAIN for paths with `..` if any file on the machine was renamed meanwhile.
        if code != errno.EAGAIN:
            break
    if code == errno.ENOSYS:
        raise ImageError(
            "this kernel has no openat2, without which images cannot be unpacked safely", hint="Use Linux 5.6+."
        )
    raise OSError(code, os.strerror(code), os.fsdecode(path))


class Root:
    """A directory, opened once. Paths are tuples of names without `.` and `..`."""

    def __init__(self, place: Path | int) -> None:
        """Open a directory, given by its path or by an open descriptor, which stays the caller's."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(".", flags, dir_fd=place) if isinstance(place, int) else os.open(place, flags)
        self._cache: OrderedDict[tuple[bytes, ...], int] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.forget()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def forget(self) -> None:
        """Close the cached descriptors of directories, because a name in their paths now means something else."""
        for fd in self._cache.values():
            os.close(fd)
        self._cache.clear()

    def directory(self, parts: tuple[bytes, ...]) -> int:
        """Return a descriptor of an existing directory, following links inside the root.

        The cache owns the descriptor: do not close it.
        """
        if not parts:
            return self.fd
        fd = self._cache.get(parts)
        if fd is not None:
            self._cache.move_to_end(parts)
            return fd
        fd = open_in_root(self.fd, b"/".join(parts), os.O_RDONLY | os.O_DIRECTORY)
        self._cache[parts] = fd
        # Closing the oldest one keeps the last few valid: an operation uses the parents of two names at once.
        if len(self._cache) > _CACHED:
            os.close(self._cache.popitem(last=False)[1])
        return fd

    def lstat(self, parts: tuple[bytes, ...]) -> os.stat_result | None:
        if not parts:
            return os.fstat(self.fd)
        try:
            return os.stat(parts[-1], dir_fd=self.directory(parts[:-1]), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def remove(self, parts: tuple[bytes, ...]) -> None:
        """Remove whatever has this name, with everything below it."""
        parent = self.directory(parts[:-1])
        info = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
            self.forget()
            remove_tree_at(parts[-1], self.directory(parts[:-1]))
        else:
            os.unlink(parts[-1], dir_fd=parent)
            if stat.S_ISLNK(info.st_mode):
                self.forget()

    def read(self, path: str, limit: int) -> bytes | None:
        """Return the content of a regular file of at most `limit` bytes, or None if it does not exist.

        Links are followed inside the root.
        """
        try:
            fd = self.open(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with os.fdopen(fd, "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ImageError(f"{path[:120]!r} in the image has more than {limit:,} bytes")
        return data

    def open(self, path: str) -> int:
        """Open a regular file for reading. A pipe or device is refused without blocking on it."""
        fd = open_in_root(self.fd, os.fsencode(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ImageError(f"{path[:120]!r} in the image is not a regular file")
        return fd

    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a regular file, replacing anything that has its name. Its directory must exist."""
        parts = tuple(part for part in os.fsencode(path).split(b"/") if part)
        with contextlib.suppress(FileNotFoundError):
            self.remove(parts)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(parts[-1], flags, mode, dir_fd=self.directory(parts[:-1])), "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
