"""Walking through a tree that untrusted code made.

The tree may be deeper than any path, call stack or limit of open files allows. So a walk is a loop, every directory is
opened relative to its parent, no link is followed, and only the last directories of the current path are kept open.
Those further up are reopened when they are needed, starting from the top.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT = 32
"""The maximum number of open descriptors for one path, besides the top."""


class OpenPath:
    """The path from an open directory, which the caller owns, down to the current one."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._names: list[str | bytes] = []
        self._open: list[int] = []
        """The descriptors of the last directories in `_names`."""

    @property
    def fd(self) -> int:
        """The descriptor of the current directory."""
        return self._open[-1] if self._open else self._top

    @property
    def depth(self) -> int:
        return len(self._names)

    def enter(self, name: str | bytes) -> None:
        self.enter_open(name, os.open(name, _OPEN, dir_fd=self.fd))

    def enter_open(self, name: str | bytes, fd: int) -> None:
        """Enter a directory that the caller has opened. This object then owns the descriptor."""
        self._names.append(name)
        self._open.append(fd)
        if len(self._open) > _KEPT:
            os.close(self._open.pop(0))

    def leave(self) -> None:
        os.close(self._open.pop())
        self._names.pop()
        if self._names and not self._open:
            names, self._names = self._names, []
            for name in names:
                self.enter(name)

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())


class Found(NamedTuple):
    parent: int
    """A descriptor of the directory that contains it, valid until the next item is requested."""
    name: str
    path: bytes
    """The path relative to the top, without a leading slash."""
    info: os.stat_result

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.info.st_mode)


def walk(top: int) -> Iterator[Found]:
    """Yield everything below an open directory, sorted by name, each directory before its content. Raises OSError."""
    way = OpenPath(top)
    # For each directory of the current path, the names that are still to be visited, in reverse order.
    waiting = [_names(top)]
    path: list[bytes] = []
    try:
        while waiting:
            if not waiting[-1]:
                waiting.pop()
                if waiting:
                    way.leave()
                    path.pop()
                continue
            name = waiting[-1].pop()
            info = os.stat(name, dir_fd=way.fd, follow_symlinks=False)
            found = Found(way.fd, name, b"/".join((*path, os.fsencode(name))), info)
            yield found
            if found.is_directory:
                way.enter(name)
                path.append(os.fsencode(name))
                waiting.append(_names(way.fd))
    finally:
        way.close()


def _names(directory: int) -> list[str]:
    return sorted(os.listdir(directory), key=os.fsencode, reverse=True)
