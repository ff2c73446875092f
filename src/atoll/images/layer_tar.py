"""A layer of a stored image as the tar stream that registries and archives hold, packed with gzip.

The same layer always becomes the same bytes: entries are sorted, names of owners are left out, and times are those of
the files in whole seconds. What a layer removes from the ones below becomes a file `.wh.NAME`, and a directory that
hides the one below has a file `.wh..wh..opq`.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from atoll.archive.overlay import is_opaque, is_opaque_directory, is_whiteout
from atoll.archive.work import Work
from atoll.errors import ImageError
from atoll.walking import Found, walk

BLOCK = 512
_CHUNK = 1 << 20
_LEVEL = 4
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_END = bytes(2 * BLOCK)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    path: Path
    digest: str
    size: int
    diff_id: str
    """The digest of the tar stream before it was packed."""


def pack(root: Path, target: Path, work: Work, detail: str) -> PackedLayer:
    """Write the layer whose root directory this is to a new file."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with target.open("xb") as file:
            stream = _Packing(file)
            _Layer(stream, work, detail).write(fd)
            return stream.finish(target)
    finally:
        os.close(fd)


def header(name: str, size: int, mode: int = 0o644) -> bytes:
    """Return the header of a file that is not part of a layer."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, mode
    return _encoded(member)


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def _encoded(member: tarfile.TarInfo) -> bytes:
    """Names stay the bytes that they are, which only GNU's format allows."""
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


class _Packing:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._packer = zlib.compressobj(_LEVEL, wbits=31)  # its header has neither a name nor a time
        self._plain, self._packed = hashlib.sha256(), hashlib.sha256()
        self.plain_size = self._size = 0

    def write(self, data: bytes) -> None:
        self._plain.update(data)
        self.plain_size += len(data)
        self._put(self._packer.compress(data))

    def finish(self, path: Path) -> PackedLayer:
        self.write(_END)
        self._put(self._packer.flush())
        self._file.flush()
        return PackedLayer(path, f"sha256:{self._packed.hexdigest()}", self._size, f"sha256:{self._plain.hexdigest()}")

    def _put(self, data: bytes) -> None:
        self._packed.update(data)
        self._size += len(data)
        self._file.write(data)


class _Layer:
    def __init__(self, stream: _Packing, work: Work, detail: str) -> None:
        self._stream, self._work, self._detail = stream, work, detail
        self._links: dict[tuple[int, int], str] = {}

    def write(self, root: int) -> None:
        if is_opaque_directory(root):
            self._stream.write(header(_OPAQUE, 0))
        for number, found in enumerate(walk(root)):
            self._work.check()
            self._entry(found)
            if number % 1000 == 0:
                self._work.report("save", self._detail, self._stream.plain_size)

    def _entry(self, found: Found) -> None:
        info, path = found.info, os.fsdecode(found.path)
        folder, slash, name = path.rpartition("/")
        if name.startswith(_WHITEOUT):
            raise ImageError(
                f"the image has a file {name[:80]!r}, which in an archive would mean the removal of another",
                hint="Rename or remove it.",
            )
        if is_whiteout(info):
            self._stream.write(header(f"{folder}{slash}{_WHITEOUT}{name}", 0))
            return
        member = tarfile.TarInfo(path)
        member.mode, member.uid, member.gid = stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid
        member.mtime = max(0, int(info.st_mtime))
        if stat.S_ISDIR(info.st_mode):
            member.type = tarfile.DIRTYPE
            self._stream.write(_encoded(member))
            if is_opaque(found.parent, found.name):
                self._stream.write(header(f"{path}/{_OPAQUE}", 0))
        elif stat.S_ISLNK(info.st_mode):
            member.type, member.linkname = tarfile.SYMTYPE, os.readlink(found.name, dir_fd=found.parent)
            self._stream.write(_encoded(member))
        elif stat.S_ISREG(info.st_mode):
            self._file(found, member)
        else:
            raise ImageError(f"the image holds a device, pipe or socket, {ascii(path)[:120]}")

    def _file(self, found: Found, member: tarfile.TarInfo) -> None:
        info = found.info
        if info.st_nlink > 1:
            first = self._links.setdefault((info.st_dev, info.st_ino), member.name)
            if first != member.name:
                member.type, member.linkname = tarfile.LNKTYPE, first
                self._stream.write(_encoded(member))
                return
        member.size = info.st_size
        self._stream.write(_encoded(member))
        left = info.st_size
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(found.name, flags, dir_fd=found.parent), "rb", buffering=0) as file:
            while left and (chunk := file.read(min(_CHUNK, left))):
                self._work.check()
                self._stream.write(chunk)
                left -= len(chunk)
        if left:
            raise ImageError(
                f"{ascii(member.name)[:120]} of the image is shorter than it was", hint="Verify the image."
            )
        self._stream.write(padding(info.st_size))
