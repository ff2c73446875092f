"""Walking through a tree that untrusted code made.

It may be deeper than any path or call stack allows, and than there are descriptors. So a walk is a loop, every
directory is opened relative to its parent, no link is followed, and only the last directories on the way down are kept
open. One further up is opened again when it is needed, by its names from the top.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT = 32
"""How many descriptors of one way are open at most, besides the top."""


class OpenPath:
    """The way from an open directory, which stays the caller's, down to the one that is looked at."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._names: list[str | bytes] = []
        self._open: list[int] = []
        """Of the last names."""

    @property
    def fd(self) -> int:
        """Of the directory that is looked at."""
        return self._open[-1] if self._open else self._top

    @property
    def depth(self) -> int:
        return len(self._names)

    def enter(self, name: str | bytes) -> None:
        self.enter_open(name, os.open(name, _OPEN, dir_fd=self.fd))

    def enter_open(self, name: str | bytes, fd: int) -> None:
        """The same, with a descriptor that the caller has opened and gives away."""
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
    """The open directory that it is in, until the next one is asked for."""
    name: str
    path: bytes
    """From the top, with no slash before it."""
    info: os.stat_result

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.info.st_mode)


def walk(top: int) -> Iterator[Found]:
    """Everything below an open directory: by name, what is in a directory right after it. Raises OSError."""
    way = OpenPath(top)
    # What is still to be looked at in each directory of the way, the next one last.
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
