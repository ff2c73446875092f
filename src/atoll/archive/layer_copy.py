"""Copying a layer that untrusted code wrote, such as the writable layer of a sandbox, into a directory of the host.

What is copied: directories, regular files with their holes, symbolic and hard links, modes, owners, times, and the
marks of an overlay (see `overlay.py`). What is left out: devices, pipes, sockets, set-id bits and other attributes.
The layer must not change meanwhile. No link is followed, and everything is counted against a budget.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from atoll import sparse
from atoll.archive.archive_limits import Budget
from atoll.archive.extract import Extraction, shown
from atoll.archive.overlay import is_opaque, is_opaque_directory, is_whiteout, mark_opaque, white_out
from atoll.archive.root import Root
from atoll.archive.work import Work
from atoll.errors import ImageError
from atoll.walking import Found, walk

_BLOCK = 1 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
Parts = tuple[bytes, ...]


def copy_layer(
    source: int, target: Path, lower: int, budget: Budget, work: Work, *, stubs: Collection[bytes] = ()
) -> Extraction:
    """Copy the layer in the open directory `source` into the existing, empty directory `target`.

    `lower` is an open directory with the merged files below the layer. Directories that are as they are there, and in
    which nothing has changed, are left out. `stubs` are paths at which a sandbox only needed something to mount on:
    they are left out if nothing is in them. Raises ImageError.
    """
    with Root(target) as root, Root(lower) as below:
        return _Copy(root, below, budget, work, frozenset(stubs)).run(source)


class _Copy:
    def __init__(self, root: Root, lower: Root, budget: Budget, work: Work, stubs: frozenset[bytes]) -> None:
        self._root, self._lower, self._budget, self._work, self._stubs = root, lower, budget, work, stubs
        self._directories: list[tuple[Parts, os.stat_result]] = []
        self._opaque: set[Parts] = set()
        self._links: dict[int, Parts] = {}
        self._result = Extraction()

    def run(self, source: int) -> Extraction:
        for found in walk(source):
            self._work.check()
            self._check(found)
            self._copy(found, tuple(found.path.split(b"/")))
        for path in sorted(self._stubs, key=len, reverse=True):
            self._remove_stub(tuple(part for part in path.split(b"/") if part))
        if is_opaque_directory(source):
            mark_opaque(self._root.fd)
            self._opaque.add(())
        for parts, info in reversed(self._directories):  # the times last, because adding an entry changes them
            if self._root.lstat(parts) is None:
                continue  # it was a stub
            if self._is_unchanged(parts, info):
                self._root.remove(parts)
            else:
                self._finish_directory(self._root.directory(parts), info)
        self._finish_directory(self._root.fd, os.fstat(source))
        return self._result

    def _check(self, found: Found) -> None:
        limits = self._budget.limits
        self._budget.spend_entry()
        if found.path.count(b"/") >= limits.depth or len(found.path) > limits.path_bytes:
            raise ImageError(f"{shown(found.path)} is more than {limits.depth} directories deep")

    def _copy(self, found: Found, parts: Parts) -> None:
        info, parent = found.info, self._root.directory(parts[:-1])
        if stat.S_ISDIR(info.st_mode):
            os.mkdir(parts[-1], 0o700, dir_fd=parent)
            if is_opaque(found.parent, found.name):
                mark_opaque(self._root.directory(parts))
                self._opaque.add(parts)
            self._directories.append((parts, info))
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(os.fsencode(found.name), dir_fd=found.parent), parts[-1], dir_fd=parent)
            os.chown(parts[-1], info.st_uid, info.st_gid, dir_fd=parent, follow_symlinks=False)
            os.utime(parts[-1], ns=(info.st_mtime_ns, info.st_mtime_ns), dir_fd=parent, follow_symlinks=False)
        elif is_whiteout(info):
            white_out(parent, parts[-1])
        elif not stat.S_ISREG(info.st_mode):
            self._skip(parts, parent)
        elif (first := self._links.get(info.st_ino)) is not None:
            os.link(
                first[-1], parts[-1], src_dir_fd=self._root.directory(first[:-1]),
                dst_dir_fd=self._root.directory(parts[:-1]), follow_symlinks=False,
            )  # fmt: skip
        else:
            if info.st_nlink > 1:
                self._links[info.st_ino] = parts
            self._file(found, parts, parent)

    def _skip(self, parts: Parts, parent: int) -> None:
        """Leave out a device, pipe or socket. What has its name below stays hidden."""
        self._result.devices_skipped += 1
        self._result.note(f"skipped the special file {shown(b'/'.join(parts))}")
        if self._below(parts) is not None:
            white_out(parent, parts[-1])

    def _file(self, found: Found, parts: Parts, parent: int) -> None:
        info = found.info
        self._budget.spend_bytes(info.st_size)
        source = os.open(found.name, _READ, dir_fd=found.parent)
        try:
            target = os.open(parts[-1], _CREATE, 0o600, dir_fd=parent)
            try:
                self._content(source, target, info.st_size)
                os.fchown(target, info.st_uid, info.st_gid)
                if info.st_mode & 0o6000:
                    self._result.set_ids_stripped += 1
                    self._result.note(f"stripped the set-id bits of {shown(found.path)}")
                os.fchmod(target, info.st_mode & 0o1777)
                os.utime(target, ns=(info.st_mtime_ns, info.st_mtime_ns))
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _content(self, source: int, target: int, size: int) -> None:
        if size <= _BLOCK:
            while block := os.read(source, _BLOCK):
                sparse.write(target, block)
            return sparse.end(target)
        position = 0
        while position < size:
            try:
                start = os.lseek(source, position, os.SEEK_DATA)
            except OSError:  # the rest of the file is a hole
                break
            end = os.lseek(source, start, os.SEEK_HOLE)
            os.lseek(target, start, os.SEEK_SET)
            position = start
            while position < end and (sent := os.sendfile(target, source, position, min(end - position, 16 * _BLOCK))):
                self._work.check()
                position += sent
            if position < end:
                break  # it is shorter than it was
        os.ftruncate(target, size)

    def _below(self, parts: Parts) -> os.stat_result | None:
        """Return the status of what this path would be without the layer, in real directories only."""
        if any(parts[:end] in self._opaque for end in range(len(parts))):
            return None
        if not all(_is_directory(self._lower.lstat(parts[:end])) for end in range(1, len(parts))):
            return None
        return self._lower.lstat(parts)

    def _is_unchanged(self, parts: Parts, info: os.stat_result) -> bool:
        if parts in self._opaque or os.listdir(self._root.directory(parts)):
            return False
        below = self._below(parts)
        mine = (info.st_mode & ~0o6000, info.st_uid, info.st_gid)
        return below is not None and mine == (below.st_mode, below.st_uid, below.st_gid)

    def _finish_directory(self, fd: int, info: os.stat_result) -> None:
        os.fchown(fd, info.st_uid, info.st_gid)
        os.fchmod(fd, info.st_mode & 0o1777)
        os.utime(fd, ns=(info.st_mtime_ns, info.st_mtime_ns))

    def _remove_stub(self, parts: Parts) -> None:
        try:
            info = self._root.lstat(parts)
        except OSError:
            return  # a part of the path is no directory
        if info is None or not parts or not self._is_own(parts):
            return
        if stat.S_ISDIR(info.st_mode):
            if not os.listdir(self._root.directory(parts)):
                self._root.remove(parts)
        elif stat.S_ISREG(info.st_mode) and info.st_size == 0:
            self._root.remove(parts)

    def _is_own(self, parts: Parts) -> bool:
        """Return whether the path leads through real directories of the copy only."""
        return all(_is_directory(self._root.lstat(parts[:end])) for end in range(1, len(parts)))


def _is_directory(info: os.stat_result | None) -> bool:
    return info is not None and stat.S_ISDIR(info.st_mode)
