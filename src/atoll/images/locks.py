"""File locks, which are released when their holder dies, and syncing a whole file system."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from atoll.archive.work import Work
from atoll.walking import walk

_libc = ctypes.CDLL(None, use_errno=True)
_POLL_S = 0.01


def sync_file_system(path: Path) -> None:
    """Sync a whole file system to disk, which is much faster than syncing each of ten thousand new files."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(fd)


def sync_tree(path: Path) -> None:
    """Sync the files of a small tree to disk one by one, which does not wait for what other programs write."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for found in walk(fd):
            if found.is_directory or stat.S_ISREG(found.info.st_mode):
                _sync(found.name, found.parent)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync(name: str, parent: int) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file or directory, if it is free. Returns whether it was."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, work: Work, waiting_for: str = "") -> Iterator[None]:
    """Hold a lock file, exclusively among all processes and threads. The death of a holder releases it.

    The file is removed afterwards.
    """
    announced = False
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            while not try_lock(fd):
                if waiting_for and not announced:
                    announced = True
                    work.report("wait", waiting_for)
                work.sleep(_POLL_S)
            if same_file(fd, path):
                break
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    try:
        yield
    finally:
        # A waiter that has opened the old file finds that it is no longer the one at this path, and tries again.
        path.unlink(missing_ok=True)
        os.close(fd)


def remove_if_free(path: Path) -> bool:
    """Remove a file unless somebody holds its lock. Returns whether it was removed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        free = try_lock(fd) and same_file(fd, path)
        if free:
            path.unlink()
        return free
    finally:
        os.close(fd)


def same_file(fd: int, path: Path) -> bool:
    """Return whether an open file is the one that now has this path."""
    try:
        theirs = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino)
