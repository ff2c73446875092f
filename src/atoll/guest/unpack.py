"""Receiving a tree from an untrusted agent and creating its files on the host.

Nothing outside of the destination can be reached: every directory is opened relative to its parent and never through a
link, names are single components, files are always created and existing ones never opened, and links are created
unchanged and never followed. Set-uid bits and owners are not kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import PurePosixPath

from atoll.errors import ProtocolError, SandboxResourceError
from atoll.guest.file_records import DIRECTORY, ERROR, FILE, LINK, RECORD, FileRecord, check_relative, parse_record
from atoll.guest.frames import MAX_PATH
from atoll.guest.host_directories import HostDirectories
from atoll.guest.host_file import HostFile, make_link
from atoll.guest.sandbox_paths import Failures

_MAX_RECORD = RECORD.size + 2 * MAX_PATH


class TreeUnpacker:
    """Creates the files of one tree: `feed` the stream, then call `finish`; call `close` in any case.

    The fed buffers must not change until `flush`.
    """

    def __init__(
        self,
        source: str,
        destination: str,
        failures: Failures,
        max_bytes: int | None,
        max_items: int | None,
        room: Callable[[int], None] | None = None,
    ) -> None:
        """`room` is called with the number of bytes that each piece uses on disk, without holes, and may raise."""
        self.items = 0
        self._source = source
        self._destination = destination
        self._failures = failures
        self._max_bytes = max_bytes
        self._max_items = max_items
        self._room = room
        self._bytes = 0
        self._partial = b""
        self._remaining = 0
        self._file: HostFile | None = None
        self._directories: HostDirectories | None = None
        self._alone = False
        """Whether the tree is a single file or link, so that no other item may follow."""

    def feed(self, data: memoryview) -> None:
        position, end = 0, len(data)
        while position < end:
            if self._file is not None:
                piece = data[position : position + self._remaining]
                taken = self._file.write(piece)
                if self._room is not None:
                    self._room(taken)
                position += len(piece)
                self._remaining -= len(piece)
                self._finish_file()
                continue
            if self._partial:
                position = self._complete(data)
                continue
            found = parse_record(data, position)
            if found is None:
                self._partial = bytes(data[position:])
                return
            position = found[1]
            self._item(found[0])

    def flush(self) -> None:
        """Write gathered data, so that the buffers fed so far are no longer needed."""
        if self._file is not None:
            self._file.flush()

    def finish(self) -> None:
        if self._partial or self._file is not None:
            raise ProtocolError("the agent's tree stops in the middle of an item")
        if self._directories is not None:
            self._directories.finish()

    def close(self) -> None:
        """Close all descriptors and remove an incomplete file. May be repeated."""
        if self._file is not None:
            self._file.abort()
            self._file = None
        if self._directories is not None:
            self._directories.close()

    def _complete(self, data: memoryview) -> int:
        """Complete a record that began in the previous frame. Returns the position after it in this one."""
        known = len(self._partial)
        joined = self._partial + bytes(data[: _MAX_RECORD - known])
        found = parse_record(joined, 0)
        if found is None:
            self._partial = joined
            return len(data)
        self._partial = b""
        self._item(found[0])
        return found[1] - known

    def _item(self, record: FileRecord) -> None:
        if record.kind == ERROR:
            path = os.fsdecode(record.path)
            self._failures.add(f"{self._source.rstrip('/')}/{path}" if path else self._source, _errno(record.size))
            return
        if record.kind not in (FILE, DIRECTORY, LINK):
            raise ProtocolError("the agent sent an item that does not belong into a tree")
        self._count(record)
        if self._directories is None:
            self._begin(record)
        elif self._alone or not record.path:
            raise ProtocolError("the agent sent the top of a tree twice, or something below a file")
        else:
            self._make(*self._directories.locate(record.path), record)

    def _begin(self, record: FileRecord) -> None:
        """Process the first item, which determines whether the destination is a directory or one file."""
        if not record.path and record.kind == DIRECTORY:
            self._directories = HostDirectories(self._destination, record.mode, record.mtime_ns)
        elif record.path:
            self._directories = HostDirectories(self._destination)
            self._make(*self._directories.locate(record.path), record)
        else:
            self._alone = True
            directory, name = os.path.split(self._destination)
            if not name or os.path.isdir(self._destination):
                directory, name = self._destination, PurePosixPath(self._source).name
            self._directories = HostDirectories(directory or ".")
            self._make(self._directories.top, check_relative(os.fsencode(name))[0], record)

    def _make(self, parent: int, name: bytes, record: FileRecord) -> None:
        if record.kind == FILE:
            self._file = HostFile(parent, name, record.mode, record.mtime_ns)
            self._remaining = record.size
            self._finish_file()
        elif record.kind == LINK:
            make_link(parent, name, record.target)
        elif self._directories is not None:
            self._directories.make(name, record.mode, record.mtime_ns)

    def _count(self, record: FileRecord) -> None:
        self.items += 1
        self._bytes += record.size if record.kind == FILE else 0
        if self._max_items is not None and self.items > self._max_items:
            raise SandboxResourceError(f"the tree has more than {self._max_items} items")
        if self._max_bytes is not None and self._bytes > self._max_bytes:
            raise SandboxResourceError(f"the tree has more than {self._max_bytes} bytes")

    def _finish_file(self) -> None:
        if self._remaining == 0 and self._file is not None:
            # `commit` cleans up after itself if it fails, so there is nothing left to abort.
            file, self._file = self._file, None
            file.commit()


def _errno(number: int) -> int:
    return number if 0 < number < 4096 else 5
