"""The format of a snapshot in a file, for moving it to another machine.

    one line of JSON     the image it is based on, and what tar cannot express: removed names, opaque directories
    memory               the files of the OCI runtime one after the other, if the snapshot has memory
    a tar archive        the content of the writable layer, compressed with gzip
    64 hex digits, \\n   the SHA-256 of everything before

The digest detects damage, not malice, because the author of the file also made the digest. So the file is unpacked like
an untrusted image: no path leads out of the layer, and devices and extended attributes are ignored. Saved memory is
more than files: its author decides which programs run, and as which user. It is therefore imported only on request.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from pydantic import ValidationError

from atoll import durable
from atoll.archive.archive_limits import Budget, ImageLimits
from atoll.archive.decompress import plain
from atoll.archive.extract import extract
from atoll.archive.root import Root
from atoll.archive.work import Work
from atoll.engines.host.saved_states import check_snapshot_digest, check_snapshot_version, read_snapshot_header
from atoll.engines.linux.linux_record import Base
from atoll.engines.linux.states import overlay_diff
from atoll.engines.linux.states.saved_state import VERSION_NOTE, SavedState
from atoll.errors import EngineError, ImageError
from atoll.storage import Layers

_FORMAT, _VERSION, _WITH_MEMORY = "atoll-snapshot", 1, 2
_MEMORY_FILES = ("checkpoint.img", "pages.img", "pages_meta.img")
_MAX_HEADER_BYTES = 8 << 20
"""The maximum length of the JSON line of a file. Parsed, it takes many times its length in memory."""
_BLOCK = 1 << 20
_OPAQUE = "user.overlay.opaque"
_ENTRY_BYTES = 512
"""The disk space that is counted for every name, be it that of an empty file or of something that was removed."""
_MAX_BYTES = 1 << 62


class MemoryFormat(Protocol):
    """The format of saved memory that this machine can restore."""

    @property
    def runtime(self) -> str:
        """The name, in records, of the launcher that saves and restores memory in this format."""

    def version(self) -> str:
        """Return the installed version of the program that saves and restores memory.

        Saved memory can be restored only by the version that wrote it. Blocks. Raises EngineUnavailableError if the
        program is not installed.
        """

    def program_stamp(self) -> str:
        """Return what differs between versions of that program, which costs less than to ask it. Blocks."""


@dataclass(frozen=True, slots=True)
class Memory:
    directory: Path
    version: str
    """The version of the program that saved it."""

    @classmethod
    def saved_in(cls, directory: Path) -> Memory:
        """Raises EngineError if it is not known which version saved the memory."""
        try:
            return cls(directory, (directory / VERSION_NOTE).read_text())
        except FileNotFoundError:
            raise EngineError(
                "it is not known which version of gVisor saved the memory, because an earlier version of Atoll made it",
                hint="Start a sandbox from the snapshot, and make and export a snapshot of that sandbox.",
            ) from None

    def files(self) -> list[tuple[str, int]]:
        """Return the names and sizes of the memory files, without files that are useful only on this machine."""
        names = sorted(name for name in os.listdir(self.directory) if name in _MEMORY_FILES)
        return [(name, (self.directory / name).stat().st_size) for name in names]


def write(layers: Layers, saved: SavedState, file: Path, memory: Memory | None = None) -> None:
    """Write a snapshot to a file, which appears complete or not at all. Raises EngineError."""
    inner = "rootfs"
    try:
        with layers.looking(saved.id, saved=True) as path, durable.draft(file) as draft, draft.open("xb") as target:
            _write(_Digesting(target), saved, path / "upper" / inner, inner, memory)
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        raise EngineError(f"the snapshot could not be written to '{file}': {error.strerror or error}") from error


def _write(target: _Digesting, saved: SavedState, root: Path, inner: str, memory: Memory | None) -> None:
    entries = sorted(overlay_diff.scan(root), key=lambda item: item[0].split("/")) if root.is_dir() else []
    header = {
        "format": _FORMAT,
        "version": _VERSION if memory is None else _WITH_MEMORY,
        "memory": None if memory is None else {"version": memory.version, "files": memory.files()},
        "name": saved.name,
        "created_at": saved.created_at,
        "size_bytes": saved.size_bytes,
        "base": saved.base.model_dump(),
        "inner": inner,
        "removed": [path for path, entry in entries if entry.whiteout],
        "opaque": [path for path, entry in entries if entry.opaque],
    }
    head = json.dumps(header).encode() + b"\n"
    if len(head) > _MAX_HEADER_BYTES:
        raise EngineError("the snapshot cannot be exported: the names of removed files take more than 8 MiB")
    target.write(head)
    for name, _ in memory.files() if memory is not None else ():
        assert memory is not None
        with (memory.directory / name).open("rb") as content:
            while block := content.read(_BLOCK):
                target.write(block)
    with gzip.GzipFile(fileobj=target, mode="wb", compresslevel=1, filename="", mtime=0) as packed:
        _pack(packed, root, [(path, entry.info) for path, entry in entries if not entry.whiteout])
    target.file.write(target.digest.hexdigest().encode() + b"\n")


def _pack(target: gzip.GzipFile, root: Path, entries: list[tuple[str, os.stat_result]]) -> None:
    links: dict[int, str] = {}
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT, errors="surrogateescape") as archive:
        for path, info in entries:
            member = tarfile.TarInfo(path)
            member.mode, member.uid, member.gid = stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid
            member.mtime = int(info.st_mtime)
            if stat.S_ISDIR(info.st_mode):
                member.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(info.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(root / path)
            elif not stat.S_ISREG(info.st_mode):
                continue  # pipes and sockets are useful only to running processes
            elif info.st_ino in links:
                member.type, member.linkname = tarfile.LNKTYPE, links[info.st_ino]
            else:
                if info.st_nlink > 1:
                    links[info.st_ino] = path
                member.size = info.st_size
                with open(root / path, "rb", opener=_no_follow) as content:
                    archive.addfile(member, content)
                continue
            archive.addfile(member)


def _no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


class _Digesting:
    """A file that computes the digest of what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A snapshot file whose digest is correct."""

    base: Base
    _said_bytes: int
    _inner: str
    _removed: tuple[str, ...]
    _opaque: tuple[str, ...]
    _content: IO[bytes]
    _start: int
    _end: int
    _budget: Budget
    _memory_version: str = ""
    _memory: tuple[tuple[str, int], ...] = ()

    @property
    def has_memory(self) -> bool:
        return bool(self._memory)

    def unpack_memory(self, directory: Path, version: str) -> None:
        """Write the saved memory to a new directory. Raises ImageError if it was saved by another version."""
        if self._memory_version != version:
            raise ImageError(
                f"the memory in the snapshot was saved by {self._memory_version[:80]!r}, this machine has {version!r}",
                hint="Import it without memory, or with the same version of gVisor.",
            )
        if sum(size for _, size in self._memory) > self._budget.limits.total_bytes:
            raise ImageError(f"the memory in the snapshot has more than {self._budget.limits.total_bytes:,} bytes")
        directory.mkdir(mode=0o700, parents=True)
        (directory / VERSION_NOTE).write_text(version)
        self._content.seek(self._start)
        for name, left in self._memory:
            with open(directory / name, "xb") as target:
                while left and (block := self._content.read(min(left, _BLOCK))):
                    target.write(block)
                    left -= len(block)

    @property
    def size_bytes(self) -> int:
        """The size that the file states but, once it is unpacked, at least the space that unpacking took. Limits depend
        on it, so the file alone is not trusted."""
        return max(self._said_bytes, self._budget.bytes_used)

    def unpack(self, layer: Path) -> None:
        target = layer / "upper" / self._inner
        target.mkdir(mode=0o755)
        self._content.seek(self._start + sum(size for _, size in self._memory))
        work = Work()
        with Root(target) as root:
            with plain(_Part(self._content, self._end), self._budget.limits, work) as reader:
                extract(reader, root, self._budget, work, whiteouts=False, detail="snapshot")
            for path in self._removed:
                self._budget.spend_entry()
                with _parent(root, path) as (parent, name):
                    os.mknod(name, stat.S_IFCHR, 0, dir_fd=parent)
            for path in self._opaque:
                self._budget.spend_entry()
                os.setxattr(root.directory(_parts(path)), _OPAQUE, b"y")


@contextmanager
def opened(file: Path, most_bytes: int | None = None) -> Iterator[SnapshotFile]:
    """Open a snapshot file, of which at most `most_bytes` will be unpacked. Raises ImageError if it is damaged or is
    not a snapshot."""
    limits = ImageLimits() if most_bytes is None else ImageLimits(total_bytes=most_bytes)
    budget = Budget(limits, entry_bytes=_ENTRY_BYTES)
    try:
        with file.open("rb") as content:
            yield _understood(content, file, budget)
    except OSError as error:
        raise ImageError(f"the snapshot '{file}' cannot be read: {error.strerror or error}") from error


def _understood(content: IO[bytes], file: Path, budget: Budget) -> SnapshotFile:
    found = read_snapshot_header(content, _FORMAT, _MAX_HEADER_BYTES)
    if found is None:
        raise ImageError(f"'{file}' is not a snapshot", hint="'atoll snapshot export' makes one.")
    header, start, end = found
    check_snapshot_version(file, header, _VERSION, _WITH_MEMORY)
    check_snapshot_digest(content, file, end)
    try:
        removed, opaque = (tuple(str(path) for path in header[name]) for name in ("removed", "opaque"))
        base = Base.model_validate(header["base"])
        base = base.model_copy(update={"defaults": base.defaults.shortened()})
        version, files = _memory_of(header.get("memory"), end - start)
        size_bytes = int(header["size_bytes"])
        if size_bytes > _MAX_BYTES or len(set(removed)) != len(removed) or len(set(opaque)) != len(opaque):
            raise ValueError("invalid sizes or names")
        return SnapshotFile(base, size_bytes, "rootfs", removed, opaque, content, start, end, budget, version, files)
    except (KeyError, TypeError, ValueError, OverflowError, ValidationError) as error:
        raise ImageError(f"'{file}' is not a snapshot: {type(error).__name__} in its header") from error


def _memory_of(told: Any, most: int) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Parse the header's entry about memory: the version that saved it, and its files. `most` is the maximum size of
    the files. Raises ValueError or TypeError for invalid content."""
    if told is None:
        return "", ()
    files = tuple((str(name), int(size)) for name, size in told["files"])
    names = [name for name, _ in files]
    if not set(names) <= set(_MEMORY_FILES) or len(set(names)) != len(names) or any(size < 0 for _, size in files):
        raise ValueError("files of a memory that no runtime writes")
    if sum(size for _, size in files) > most:
        raise ValueError("more memory than the file has")
    return str(told["version"]), files


@dataclass(frozen=True, slots=True)
class _Part:
    """A reader that stops before the digest at the end."""

    content: IO[bytes]
    end: int

    def read(self, size: int, /) -> bytes:
        return self.content.read(max(0, min(size, self.end - self.content.tell())))


@contextmanager
def _parent(root: Root, path: str) -> Iterator[tuple[int, bytes]]:
    parts = _parts(path)
    with contextlib.suppress(FileNotFoundError):
        root.remove(parts)
    yield root.directory(parts[:-1]), parts[-1]


def _parts(path: str) -> tuple[bytes, ...]:
    parts = tuple(os.fsencode(part) for part in path.split("/") if part not in ("", "."))
    if not parts or b".." in parts or any(b"\0" in part for part in parts):
        raise ImageError(f"the snapshot contains a path that leads out of it, {path[:120]!r}")
    return parts
