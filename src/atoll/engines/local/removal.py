"""Removing a tree that untrusted code made.

It may be deeper than any path or call stack allows, hold directories without permissions and names in no encoding, and
links to anywhere. So every step is relative to an open directory, nothing is ever followed, and a directory that is
found inside is first moved to the top, which keeps two descriptors open whatever the depth. The code that made it must
be dead already.
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
    """Remove a file or a tree. What is not there is fine. Its parent must be a directory that only we can write to."""
    try:
        parent = os.open(path.parent, _OPEN)
    except FileNotFoundError:
        return
    try:
        if not _remove_file(path.name, parent):
            _remove_directory(path.name, parent)
    finally:
        os.close(parent)


def _remove_file(name: str, parent: int) -> bool:
    """False: it is a directory."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except (IsADirectoryError, PermissionError):
        return False
    return True


def _remove_directory(name: str, parent: int) -> None:
    scratch_name = f".removing-{secrets.token_hex(8)}"
    os.mkdir(scratch_name, 0o700, dir_fd=parent)
    scratch = os.open(scratch_name, _OPEN, dir_fd=parent)
    try:
        numbers = count()
        pending = [f"{next(numbers)}"]
        _move(name, parent, pending[0], scratch)
        while pending:
            current = pending.pop()
            _empty(current, scratch, numbers, pending)
            os.rmdir(current, dir_fd=scratch)
    finally:
        os.close(scratch)
        # Not empty only after an error, which is on its way to the caller; the next attempt removes it like any tree.
        with suppress(OSError):
            os.rmdir(scratch_name, dir_fd=parent)


def _empty(name: str, scratch: int, numbers: count[int], pending: list[str]) -> None:
    directory = _open_directory(name, scratch)
    try:
        while True:
            # In batches, since removing may confuse a running listing, and a whole listing may not fit into memory.
            with os.scandir(directory) as entries:
                batch = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in islice(entries, _BATCH)]
            if not batch:
                return
            for entry_name, is_directory in batch:
                if not is_directory:
                    os.unlink(entry_name, dir_fd=directory)
                    continue
                moved = f"{next(numbers)}"
                _move(entry_name, directory, moved, scratch)
                pending.append(moved)
    finally:
        os.close(directory)


def _move(name: str, source: int, moved: str, scratch: int) -> None:
    try:
        os.rename(name, moved, src_dir_fd=source, dst_dir_fd=scratch)
    except PermissionError:  # giving a directory another parent means writing to it
        os.close(_open_directory(name, source))
        os.rename(name, moved, src_dir_fd=source, dst_dir_fd=scratch)


def _open_directory(name: str, parent: int) -> int:
    """Open it, and make sure that we may list and change it, whatever its mode."""
    fd = os.open(name, os.O_PATH | _OPEN, dir_fd=parent)
    try:
        if os.geteuid() != 0 and os.fstat(fd).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{fd}", 0o700)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(fd)
