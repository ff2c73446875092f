"""Merging neighbouring layers of an image into one, so that stacks stay shallow.

The result is a layer again: it removes and hides what the merged layers remove and hide of what lies below them. Files
of stored layers never change, so they are shared by hard links and not copied.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from atoll.archive.overlay import is_opaque, is_opaque_directory, is_whiteout, mark_opaque, white_out
from atoll.archive.root import Root
from atoll.archive.work import Work
from atoll.walking import Found, walk

Parts = tuple[bytes, ...]


def merge(top: Path, lower: Sequence[Path], bottom: Path, target: Path, work: Work) -> None:
    """Make the layer `target` out of a layer and those directly below it, which are given topmost first. It lies on the
    complete tree `bottom`. All have to be on one file system."""
    target.mkdir(mode=0o700)
    with Root(target) as root, Root(bottom) as lowest:
        merging = _Merging(root, lowest, work)
        for layer in (*reversed(lower), top):
            fd = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                merging.apply(fd)
            finally:
                os.close(fd)


class _Merging:
    def __init__(self, root: Root, bottom: Root, work: Work) -> None:
        self._root, self._bottom, self._work = root, bottom, work

    def apply(self, layer: int) -> None:
        """Put a layer on top of what has been merged so far."""
        directories: list[tuple[Parts, os.stat_result]] = [((), os.fstat(layer))]
        if is_opaque_directory(layer):
            for name in os.listdir(self._root.fd):
                self._root.remove((os.fsencode(name),))
            mark_opaque(self._root.fd)
        for found in walk(layer):
            self._work.check()
            parts = tuple(found.path.split(b"/"))
            if found.is_directory:
                self._directory(found, parts)
                directories.append((parts, found.info))
            else:
                self._other(found, parts)
        for parts, info in reversed(directories):
            fd = self._root.directory(parts)
            os.fchown(fd, info.st_uid, info.st_gid)
            os.fchmod(fd, stat.S_IMODE(info.st_mode))
            os.utime(fd, ns=(info.st_mtime_ns, info.st_mtime_ns))

    def _directory(self, found: Found, parts: Parts) -> None:
        existing, opaque = self._root.lstat(parts), is_opaque(found.parent, found.name)
        if existing is not None and stat.S_ISDIR(existing.st_mode) and not opaque:
            return
        if existing is not None:
            # Whatever it replaces here hid what has this name below, and so must the directory.
            opaque = True
            self._root.remove(parts)
        os.mkdir(parts[-1], 0o700, dir_fd=self._root.directory(parts[:-1]))
        if opaque:
            mark_opaque(self._root.directory(parts))

    def _other(self, found: Found, parts: Parts) -> None:
        if self._root.lstat(parts) is not None:
            self._root.remove(parts)
        parent = self._root.directory(parts[:-1])
        if is_whiteout(found.info):
            if self._hides_something(parts):
                white_out(parent, parts[-1])
            return
        try:
            os.link(found.name, parts[-1], src_dir_fd=found.parent, dst_dir_fd=parent, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EMLINK or not stat.S_ISREG(found.info.st_mode):
                raise
            self._copy(found, parts, parent)

    def _hides_something(self, parts: Parts) -> bool:
        """Return whether a whiteout is needed here. One that hides nothing would be listed as a file."""
        for end in range(len(parts)):
            if is_opaque_directory(self._root.directory(parts[:end])):
                return False
            info = self._bottom.lstat(parts[:end])
            if info is None or not stat.S_ISDIR(info.st_mode):
                return False
        return self._bottom.lstat(parts) is not None

    def _copy(self, found: Found, parts: Parts, parent: int) -> None:
        """Copy a file that has as many links already as the file system allows."""
        info = found.info
        source = os.open(found.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=found.parent)
        try:
            target = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=parent)
            try:
                while os.sendfile(target, source, None, 1 << 24):
                    self._work.check()
                os.fchown(target, info.st_uid, info.st_gid)
                os.fchmod(target, stat.S_IMODE(info.st_mode))
                os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))
            finally:
                os.close(target)
        finally:
            os.close(source)
