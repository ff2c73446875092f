"""Directories of the host below one destination, accessed only through file descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import NamedTuple

from atoll.errors import ProtocolError, SandboxResourceError
from atoll.guest.file_records import check_relative
from atoll.guest.host_file import clamp_mtime
from atoll.guest.pack import MAX_DEPTH
from atoll.walking import OpenPath

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DIRECTORIES = 1_000_000
"""The maximum number of new directories, which are remembered until the end."""
_PRIVATE = 0o700
"""The mode of a directory while it is filled, because the final mode may forbid writing."""


class _Made(NamedTuple):
    """A new directory, with the attributes that it gets when it is complete."""

    path: bytes
    mode: int
    mtime_ns: int


class HostDirectories:
    """Opens and creates the directories of one tree.

    The path to the last used directory stays open: a tree arrives in order, so it is usually the next one, too.
    """

    def __init__(self, top: str, mode: int | None = None, mtime_ns: int = 0) -> None:
        """Create the top and its parents if missing. Links in `top` are followed, because the caller chose it."""
        self._made: list[_Made] = []
        if not os.path.isdir(top):
            os.makedirs(os.path.dirname(top.rstrip("/")) or ".", exist_ok=True)
            os.mkdir(top, 0o777 if mode is None else _PRIVATE)
            if mode is not None:
                self._made.append(_Made(b"", mode, mtime_ns))
        self.top = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._way = OpenPath(self.top)
        self._paths = [b""]
        """The paths of the open directories, from the top down."""

    def locate(self, path: bytes) -> tuple[int, bytes]:
        """Return a descriptor of the parent of `path`, and its last component."""
        parent, slash, name = path.rpartition(b"/")
        check_relative(name if parent or not slash else path)
        if parent != self._paths[-1]:
            self._go(parent, path)
        return self._way.fd, name

    def make(self, name: bytes, mode: int, mtime_ns: int) -> None:
        """Create a directory in the one located last, and enter it. An existing directory keeps its mode."""
        here = self._paths[-1]
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _PRIVATE, dir_fd=self._way.fd)
            self._made.append(_Made(_join(here, name), mode, mtime_ns))
            if len(self._made) > _MAX_DIRECTORIES:
                raise SandboxResourceError(f"the tree has more than {_MAX_DIRECTORIES} directories")
        try:
            fd = os.open(name, _OPEN, dir_fd=self._way.fd)
        except OSError as error:
            reason = "this exists and is not a directory"
            raise OSError(error.errno, reason, os.fsdecode(_join(here, name))) from error
        self._enter(name, fd)

    def finish(self) -> None:
        """Give the new directories, children first, their final attributes. Called when the tree is complete."""
        for path, mode, mtime_ns in reversed(self._made):
            self._go(path, path)
            os.utime(self._way.fd, ns=clamp_mtime(mtime_ns))
            os.fchmod(self._way.fd, mode & 0o777)

    def close(self) -> None:
        self._way.close()
        os.close(self.top)

    def _go(self, parent: bytes, path: bytes) -> None:
        while len(self._paths) > 1 and not _contains(self._paths[-1], parent):
            self._way.leave()
            self._paths.pop()
        here = self._paths[-1]
        if parent == here:
            return
        for name in check_relative(parent[len(here) + 1 :] if here else parent):
            self._enter(name, self._open_announced(self._way.fd, name, path))

    def _enter(self, name: bytes, fd: int) -> None:
        self._way.enter_open(name, fd)
        self._paths.append(_join(self._paths[-1], name))
        if len(self._paths) > MAX_DEPTH:
            raise ProtocolError(f"the agent's tree is deeper than {MAX_DEPTH} directories")

    def _open_announced(self, parent: int, name: bytes, path: bytes) -> int:
        try:
            return os.open(name, _OPEN, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                # A directory that the agent had announced would exist here.
                text = os.fsdecode(path[:200])
                raise ProtocolError(f"the agent sent {text!r}, whose parent is not a directory of the tree") from error
            raise


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name


def _contains(directory: bytes, path: bytes) -> bool:
    return path == directory or path.startswith(directory + b"/")
