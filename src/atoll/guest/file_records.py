"""Records: the descriptions of files in a list or tree, one after another in a byte stream."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from atoll.errors import ProtocolError
from atoll.guest.frames import MAX_PATH, decode_text

RECORD = struct.Struct("<BBHHHIIIQq")
"""Kind, 0, length of path, length of target, 0, mode, uid, gid, size, mtime in ns; then path and target."""

FILE, DIRECTORY, LINK, ERROR = b"fdl!"
HARD_LINK = ord("h")
"""One more name of a file that was sent before. Only builds send it."""

Kind = Literal["file", "directory", "link", "fifo", "socket", "char_device", "block_device"]
KINDS: dict[int, Kind] = {
    FILE: "file",
    DIRECTORY: "directory",
    LINK: "link",
    ord("p"): "fifo",
    ord("s"): "socket",
    ord("c"): "char_device",
    ord("b"): "block_device",
}


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of a sandbox. `path` is the requested path (stat), the name (list) or relative to the start (walk)."""

    path: str
    kind: Kind
    mode: int
    """The permission bits only."""
    uid: int
    gid: int
    size: int
    mtime_s: float
    target: str | None = None
    """The target of a symbolic link."""

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]


class FileRecord(NamedTuple):
    kind: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    path: bytes
    target: bytes

    def info(self) -> FileInfo:
        return FileInfo(
            path=decode_text(self.path),
            kind=KINDS[self.kind],
            mode=self.mode & 0o7777,
            uid=self.uid,
            gid=self.gid,
            size=self.size,
            mtime_s=self.mtime_ns / 1e9,
            target=decode_text(self.target) if self.kind == LINK else None,
        )


def encode_record(
    kind: int, path: bytes, mode: int, size: int, mtime_ns: int, target: bytes = b"", *, owner: tuple[int, int] = (0, 0)
) -> bytes:
    """Encode a record of a tree to send. Its owner counts only in copies with owners; otherwise the receiver becomes
    the owner of the files."""
    return RECORD.pack(kind, 0, len(path), len(target), 0, mode, *owner, size, mtime_ns) + path + target


def parse_record(data: bytes | bytearray | memoryview, position: int) -> tuple[FileRecord, int] | None:
    """Return the record at `position` and the position after it, or None if the record is incomplete."""
    start = position + RECORD.size
    if len(data) < start:
        return None
    kind, zero, path_length, target_length, zero2, mode, uid, gid, size, mtime_ns = RECORD.unpack_from(data, position)
    if zero or zero2 or path_length > MAX_PATH or target_length > MAX_PATH:
        raise ProtocolError("the agent sent a malformed record")
    if kind not in KINDS and kind != ERROR:
        raise ProtocolError(f"the agent sent a record of unknown kind {kind}")
    stop = start + path_length + target_length
    if len(data) < stop:
        return None
    path = bytes(data[start : start + path_length])
    target = bytes(data[start + path_length : stop])
    if 0 in path or 0 in target:
        raise ProtocolError("the agent sent a name with a zero byte in it")
    return FileRecord(kind, mode, uid, gid, size, mtime_ns, path, target), stop


class FileRecordParser:
    """Parses a stream of records, fed in pieces of any size. At most one incomplete record is held between pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[FileRecord]:
        data = self._rest + data if self._rest else data
        position = 0
        while (found := parse_record(data, position)) is not None:
            record, position = found
            yield record
        self._rest = data[position:]

    def finish(self) -> None:
        if self._rest:
            raise ProtocolError("the agent's list stops in the middle of a record")


def check_relative(path: bytes) -> list[bytes]:
    """Return the components of a path that must stay below its start. Raises ProtocolError for '.', '..' or ''."""
    components = path.split(b"/")
    for component in components:
        if component in (b"", b".", b"..") or 0 in component:
            raise ProtocolError(
                f"the agent sent the path {decode_text(path[:200])!r}, which is not a plain relative one"
            )
    return components
