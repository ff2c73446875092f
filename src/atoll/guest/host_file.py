"""Atomic creation of files and symbolic links on the host."""

from __future__ import annotations

import contextlib
import os
import secrets

from atoll import sparse

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_GATHERED = 256
_LAST_SECOND = (1 << 32) - 1
"""A time in 2106, the latest that every file system can store."""


def clamp_mtime(mtime_ns: int) -> tuple[int, int]:
    """Return access and modification time for `os.utime`, clamped to a range that every file system can store."""
    mtime_ns = min(max(mtime_ns, 0), _LAST_SECOND * 1_000_000_000)
    return mtime_ns, mtime_ns


class HostFile:
    """A file that is being written. If the name exists, a temporary file is written and renamed over it."""

    __slots__ = ("_fd", "_gathered", "_has_holes", "_mode", "_mtime_ns", "_name", "_parent", "_written_name")

    def __init__(self, parent: int, name: bytes, mode: int, mtime_ns: int) -> None:
        """`parent` must stay open until `commit` or `abort`."""
        self._parent = parent
        self._name = self._written_name = name
        self._mode = mode & 0o777
        self._mtime_ns = mtime_ns
        self._gathered: list[memoryview] = []
        self._has_holes = False
        try:
            self._fd = os.open(name, _CREATE, 0o600, dir_fd=parent)
        except FileExistsError:
            self._written_name = _temporary_name()
            self._fd = os.open(self._written_name, _CREATE, 0o600, dir_fd=parent)
        except OSError as error:
            raise _named(error, name) from None

    def write(self, data: memoryview) -> int:
        """Write data and return how many bytes of it use disk space: blocks of zeros become holes.

        Other data is gathered, because file systems take large pieces much faster. It must not change until `flush`.
        """
        if sparse.may_have_holes(data):
            self.flush()
            self._has_holes = True
            try:
                return sparse.write(self._fd, data)
            except OSError as error:
                raise _named(error, self._name) from None
        self._gathered.append(data)
        if len(self._gathered) == _MAX_GATHERED:
            self.flush()
        return len(data)

    def flush(self) -> None:
        pieces, self._gathered = self._gathered, []
        try:
            while pieces:
                written = os.writev(self._fd, pieces)
                while pieces and written >= len(pieces[0]):
                    written -= len(pieces.pop(0))
                if written:
                    pieces[0] = pieces[0][written:]
        except OSError as error:
            raise _named(error, self._name) from None

    def commit(self) -> None:
        try:
            self.flush()
            if self._has_holes:
                sparse.end(self._fd)
            os.fchmod(self._fd, self._mode)
            os.utime(self._fd, ns=clamp_mtime(self._mtime_ns))
            if self._written_name is not self._name:
                os.rename(self._written_name, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        except OSError as error:
            self.abort()
            raise _named(error, self._name) from None
        os.close(self._fd)

    def abort(self) -> None:
        os.close(self._fd)
        with contextlib.suppress(OSError):
            os.unlink(self._written_name, dir_fd=self._parent)


def make_link(parent: int, name: bytes, target: bytes) -> None:
    """Create a symbolic link with exactly this target, replacing a file or link of that name."""
    try:
        try:
            os.symlink(target, name, dir_fd=parent)
        except FileExistsError:
            temporary = _temporary_name()
            os.symlink(target, temporary, dir_fd=parent)
            try:
                os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except OSError:
                os.unlink(temporary, dir_fd=parent)
                raise
    except OSError as error:
        raise _named(error, name) from None


def _temporary_name() -> bytes:
    return b".atoll-" + secrets.token_hex(8).encode()


def _named(error: OSError, name: bytes) -> OSError:
    return OSError(error.errno, error.strerror, os.fsdecode(name))
