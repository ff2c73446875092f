"""Removing a tree that untrusted code made.

The tree may be deeper than any path or call stack allows, and contain directories without permissions, names in no
encoding, and links to anywhere. So every step is relative to an open directory, no link is followed, and nested
directories are first moved to the top, so that only a few descriptors are open whatever the depth. Moved directories
stay in the tree, so a later call can finish the work of a killed process. The code that made the tree must have ended.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

_BATCH = 4096
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Path) -> None:
    """Remove a file or a tree, if it exists. Several processes may remove the same tree at once."""
    try:
        parent = os.open(path.parent, _OPEN & ~os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        remove_tree_at(path.name, parent)
    finally:
        os.close(parent)


def remove_tree_at(name: str | bytes, parent: int) -> None:
    """Remove a file or a tree, given by its name in an open directory."""
    if not _remove_file(name, parent):
        with suppress(FileNotFoundError):
            _remove_directory(name, parent)


def _remove_file(name: str | bytes, parent: int) -> bool:
    """Remove a file if it exists. Returns False if it is a directory."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except (IsADirectoryError, PermissionError):
        return False
    return True


def _remove_directory(name: str | bytes, parent: int) -> None:
    top = _open_directory(name, parent)
    numbers, prefix = count(), f".removing-{secrets.token_hex(8)}-"
    try:
        # Work in batches: removing entries may disturb a listing in progress, and a full one may not fit into memory.
        while batch := _some(top):
            for entry, is_directory in batch:
                with suppress(FileNotFoundError):  # another process has removed it
                    if not is_directory:
                        os.unlink(entry, dir_fd=top)
                        continue
                    _empty(entry, top, numbers, prefix)
                    os.rmdir(entry, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)


def _empty(name: str, top: int, numbers: count[int], prefix: str) -> None:
    """Remove the files of a directory, and move its subdirectories to the top."""
    directory = _open_directory(name, top)
    try:
        while batch := _some(directory):
            for entry, is_directory in batch:
                with suppress(FileNotFoundError):
                    if is_directory:
                        _move(entry, directory, f"{prefix}{next(numbers)}", top)
                    else:
                        os.unlink(entry, dir_fd=directory)
    finally:
        os.close(directory)


def _some(directory: int) -> list[tuple[str, bool]]:
    """Return some entries of a directory, and for each whether it is a directory."""
    # Open the directory again each time: on btrfs an open one may not list entries that were moved into it since.
    again = os.open(".", _OPEN, dir_fd=directory)
    try:
        with os.scandir(again) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in islice(entries, _BATCH)]
    finally:
        os.close(again)


def _move(name: str, source: int, moved: str, target: int) -> None:
    try:
        os.rename(name, moved, src_dir_fd=source, dst_dir_fd=target)
    except PermissionError:  # moving a directory changes its '..' and so needs write permission for it
        os.close(_open_directory(name, source))
        os.rename(name, moved, src_dir_fd=source, dst_dir_fd=target)


def _open_directory(name: str | bytes, parent: int) -> int:
    """Open a directory, changing its mode if necessary to be able to list and modify it."""
    fd = os.open(name, os.O_PATH | _OPEN, dir_fd=parent)
    try:
        if os.geteuid() != 0 and os.fstat(fd).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{fd}", 0o700)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(fd)
