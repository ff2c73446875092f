"""Sending a tree of the host as a stream of items: many small files in one frame, a large file in many.

Symbolic links below the start are sent as links and never followed. Directories are opened relative to their parents,
so a tree that changes meanwhile cannot lead outside of itself.
"""

from __future__ import annotations

import errno
import os
import stat

from atoll.guest.bulk import FILE_CHUNK, BulkConnection
from atoll.guest.file_records import DIRECTORY, FILE, LINK, encode_record
from atoll.guest.sandbox_paths import Failures
from atoll.walking import OpenPath

CHUNK = FILE_CHUNK
_SMALL = 64 * 1024
MAX_DEPTH = 512
_MODE = 0o1777
"""The bits of a mode that are kept; set-uid and set-gid are not among them."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreePacker:
    def __init__(self, bulk: BulkConnection, failures: Failures) -> None:
        self.items = 0
        self._bulk = bulk
        self._failures = failures
        self._buffer = memoryview(bytearray(CHUNK))
        self._filled = 0

    def pack(self, source: str) -> None:
        """Send a file, or a directory with everything in it."""
        if stat.S_ISDIR(os.stat(source).st_mode):
            fd = os.open(source, _READ_DIRECTORY)
            try:
                self._tree(fd)
            finally:
                os.close(fd)
        else:
            self._file(None, source, b"")
        self.flush()

    def flush(self) -> None:
        if self._filled:
            self._bulk.send_data(self._buffer[: self._filled])
            self._filled = 0

    def _tree(self, top: int) -> None:
        way = OpenPath(top)
        # For each open directory: its path, and the names of its subdirectories that are still to be sent.
        waiting = [(b"", self._directory(top, b""))]
        try:
            while waiting:
                path, names = waiting[-1]
                if not names:
                    waiting.pop()
                    if waiting:
                        way.leave()
                    continue
                name = names.pop()
                below = _join(path, name)
                if self._enter(way, name, below):
                    waiting.append((below, self._directory(way.fd, below)))
        finally:
            way.close()

    def _enter(self, way: OpenPath, name: str, path: bytes) -> bool:
        try:
            if way.depth >= MAX_DEPTH:
                raise OSError(errno.ENAMETOOLONG, "too deep")
            way.enter(name)
        except OSError as error:
            self._failed(path, error)
            return False
        return True

    def _directory(self, fd: int, path: bytes) -> list[str]:
        """Send a directory and the files in it. Returns the names of its subdirectories."""
        status = os.fstat(fd)
        self.put(encode_record(DIRECTORY, path, status.st_mode & _MODE, 0, status.st_mtime_ns))
        directories: list[str] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.name)
                else:
                    self._leaf(fd, entry, _join(path, entry.name))
        return directories

    def _leaf(self, parent: int, entry: os.DirEntry[str], path: bytes) -> None:
        try:
            if entry.is_file(follow_symlinks=False):
                self._file(parent, entry.name, path)
            elif entry.is_symlink():
                target = os.fsencode(os.readlink(entry.name, dir_fd=parent))
                mtime_ns = os.stat(entry.name, dir_fd=parent, follow_symlinks=False).st_mtime_ns
                self.put(encode_record(LINK, path, 0o777, 0, mtime_ns, target))
            else:
                raise OSError(errno.EINVAL, "neither a file nor a directory nor a link")
        except OSError as error:
            self._failed(path, error)

    def _file(self, parent: int | None, name: str, path: bytes) -> None:
        fd = os.open(name, _READ, dir_fd=parent)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", name)
            size = status.st_size
            self.put(encode_record(FILE, path, status.st_mode & _MODE, size, status.st_mtime_ns))
            self.put_content(fd, path, size)
        finally:
            os.close(fd)

    def put_content(self, fd: int, path: bytes, size: int) -> None:
        """Send the content of a file whose record was sent."""
        if size <= _SMALL:
            self._small(fd, path, size)
        else:
            self._large(fd, path, size)

    def put_bytes(self, data: bytes) -> None:
        """Send content that is in memory, of a file whose record was sent."""
        self.flush()
        self._bulk.send_data(memoryview(data))

    def _small(self, fd: int, path: bytes, size: int) -> None:
        """Send exactly `size` bytes, as announced. If the file has become shorter, the rest is sent as zeros and the
        file is recorded as a failure."""
        if self._filled + size > CHUNK:
            self.flush()
        view = self._buffer[self._filled : self._filled + size]
        self._filled += size
        while view:
            try:
                got = os.readv(fd, (view,))
            except OSError:
                got = 0
            if got == 0:
                view[:] = bytes(len(view))
                self._failures.add(os.fsdecode(path), errno.EIO)
                break
            view = view[got:]

    def _large(self, fd: int, path: bytes, size: int) -> None:
        self.flush()
        if self._bulk.send_file(fd, size) < size:
            self._failures.add(os.fsdecode(path), errno.EIO)

    def put(self, record: bytes) -> None:
        """Send a record. The content of a file has to follow."""
        self.items += 1
        if self._filled + len(record) > CHUNK:
            self.flush()
        self._buffer[self._filled : self._filled + len(record)] = record
        self._filled += len(record)

    def _failed(self, path: bytes, error: OSError) -> None:
        self._failures.add(os.fsdecode(path), error.errno or errno.EIO)


def _join(directory: bytes, name: str) -> bytes:
    return directory + b"/" + os.fsencode(name) if directory else os.fsencode(name)
