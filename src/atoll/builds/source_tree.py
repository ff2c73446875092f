"""What COPY and ADD read: the context of a build, an earlier stage or an image, by a descriptor of its root.

Nothing is opened by a path that could lead out of the tree. A source that is named may itself be a link: it is followed
inside the tree. Links below a source are copied as links. Devices, pipes and sockets are left out.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from atoll.archive.root import open_in_root
from atoll.builds.dockerfile import globs
from atoll.builds.dockerfile.ignore import IgnoreRules
from atoll.builds.known_digests import FileVersion, KnownDigests, now_ns
from atoll.errors import BuildError
from atoll.guest.file_records import DIRECTORY, FILE, HARD_LINK, LINK
from atoll.printable import printable

_CHUNK = 1 << 20
_KEPT_BITS = 0o1777
"""The bits of a mode that are kept; set-uid and set-gid are not among them."""
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_MAX_NOTES = 20


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """How much may be copied from one tree."""

    entries: int = 250_000
    total_bytes: int = 32 << 30
    depth: int = 128


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, directory or link below a source."""

    kind: int
    below: bytes
    """Its path relative to the source; empty for the source itself."""
    path: bytes
    """Its path in the tree, without any link on the way."""
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    identity: tuple[int, int, int]
    """Device, inode and time of the last change, by which a change in the meantime is noticed."""
    target: bytes = b""
    """Of a link; of a hard link, what `below` is of the entry that it is another name of."""


@dataclass(frozen=True, slots=True)
class Source:
    """What one name stands for: a file, or a directory with everything in it."""

    name: bytes
    """The last component of its path."""
    entries: tuple[Entry, ...]

    @property
    def is_directory(self) -> bool:
        return self.entries[0].kind == DIRECTORY


@dataclass(slots=True)
class SourceTree:
    """A tree to copy from. Its methods block; each tree is used by one thread at a time."""

    root: int
    name: str
    """As it is called in messages, such as "the context"."""
    keeps_owners: bool = False
    """Whether files keep their owners. Those of a context belong to root."""
    rules: IgnoreRules | None = None
    limits: TreeLimits = field(default_factory=TreeLimits)
    known: KnownDigests | None = None
    """The digests of files that earlier builds read."""
    check: Callable[[], None] = lambda: None
    """Called often; raises if the work was cancelled."""
    notes: list[str] = field(default_factory=list)
    """What was left out."""
    _names: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """The first names of files with several, in the source that is read."""
    _entries: int = 0
    _bytes: int = 0
    _digests: dict[FileVersion, bytes] = field(default_factory=dict)

    def select(self, pattern: str, exclude: IgnoreRules | None = None) -> list[Source]:
        """Return what a source of COPY stands for, sorted by name. Raises BuildError if it stands for nothing."""
        clean = posixpath.normpath("/" + pattern).lstrip("/")
        found = self._matching(clean) if globs.has_wildcards(clean) else [clean]
        sources = [source for path in found if (source := self._source(path, exclude)) is not None]
        if not sources and not globs.has_wildcards(clean):
            raise self._missing(pattern)
        return sources

    def digest(self, sources: list[Source]) -> bytes:
        """Return the digest of names, kinds, modes, owners and contents, but not of times."""
        whole = hashlib.sha256()
        for source in sources:
            whole.update(b"source\0" + source.name + b"\0")
            for entry in source.entries:
                content = self._content_digest(entry) if entry.kind == FILE else entry.target
                fields = b"%c %o %d %d %d " % (entry.kind, entry.mode, entry.uid, entry.gid, len(content))
                whole.update(fields + content + b"\0" + entry.below + b"\0")
        return whole.digest()

    def open(self, entry: Entry) -> int:
        """Open a file for reading. Raises BuildError if it has changed since it was selected."""
        fd = open_in_root(self.root, entry.path, _READ)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or _identity(info) != entry.identity or info.st_size != entry.size:
            os.close(fd)
            raise self._changed(entry)
        return fd

    def _changed(self, entry: Entry) -> BuildError:
        return BuildError(f"{_shown(entry.path)} in {self.name} was changed during the build", hint="Build again.")

    def _content_digest(self, entry: Entry) -> bytes:
        version = FileVersion(*entry.identity, entry.mtime_ns, entry.size)
        known = self._digests.get(version)
        if known is None and self.known is not None:
            known = self.known.of(version)
        if known is None:
            known = self._digests[version] = self._read_digest(entry, version)
        return known

    def _read_digest(self, entry: Entry, version: FileVersion) -> bytes:
        digest = hashlib.sha256()
        began = now_ns()
        with os.fdopen(self.open(entry), "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                self.check()
            if _identity(os.fstat(file.fileno())) != entry.identity:
                raise self._changed(entry)
        if self.known is not None:
            self.known.add(version, digest.digest(), began)
        return digest.digest()

    def _source(self, path: str, exclude: IgnoreRules | None) -> Source | None:
        """Return what a path stands for, or None if it is left out."""
        raw = os.fsencode(path)
        try:
            fd = open_in_root(self.root, raw, os.O_PATH)
        except (FileNotFoundError, NotADirectoryError):
            raise self._missing(path) from None
        except OSError as error:
            raise BuildError(f"{_shown(raw)} in {self.name} cannot be read: {error.strerror}") from error
        try:
            info = os.fstat(fd)
            # The name may lead through links. Reading goes on at the place that it leads to.
            real = _real_path(self.root, fd) if raw else b""
            if path and self._is_left_out(path, exclude, is_directory=stat.S_ISDIR(info.st_mode)):
                return None
            if stat.S_ISDIR(info.st_mode):
                entries = tuple(self._below(info, raw, real, exclude))
            elif stat.S_ISREG(info.st_mode):
                self._spend(info.st_size)
                entries = (self._entry(FILE, b"", real, info),)
            else:
                raise BuildError(f"{_shown(raw)} in {self.name} is neither a file nor a directory")
        finally:
            os.close(fd)
        return Source(posixpath.basename(raw), entries)

    def _missing(self, path: str) -> BuildError:
        hint = "Links that lead out of it are not followed, and .dockerignore may leave files out."
        return BuildError(
            f"there is no {printable(path)[:200]!r} in {self.name}", hint=hint if self.rules is not None else None
        )

    def _spend(self, size: int) -> None:
        """Count one more file. Raises BuildError beyond the limits."""
        self._entries += 1
        self._bytes += size
        if self._entries > self.limits.entries:
            raise BuildError(
                f"more than {self.limits.entries:,} files of {self.name} would be copied",
                hint="List what the image does not need in .dockerignore, or copy an archive with ADD.",
            )
        if self._bytes > self.limits.total_bytes:
            raise BuildError(
                f"more than {self.limits.total_bytes:,} bytes of {self.name} would be copied",
                hint="List what the image does not need in .dockerignore.",
            )

    def _below(self, info: os.stat_result, name: bytes, real: bytes, exclude: IgnoreRules | None) -> Iterator[Entry]:
        """Yield a directory and everything in it that is not excluded, in the order of names."""
        self._spend(0)
        self._names = {}
        yield self._entry(DIRECTORY, b"", real, info)
        fd = open_in_root(self.root, real, os.O_RDONLY | os.O_DIRECTORY)
        yield from self._children(fd, b"", name, real, exclude, 1)

    def _children(
        self,
        fd: int,
        below: bytes,
        name: bytes,
        real: bytes,
        exclude: IgnoreRules | None,
        depth: int,
    ) -> Iterator[Entry]:
        """Yield what is in an open directory, which is closed at the end."""
        try:
            if depth > self.limits.depth:
                raise BuildError(f"{self.name} has more than {self.limits.depth} directories in one another")
            for entry in sorted(os.listdir(fd), key=os.fsencode):
                self.check()
                child = os.fsencode(entry)
                info = os.stat(entry, dir_fd=fd, follow_symlinks=False)
                yield from self._child(
                    fd, entry, info, _join(below, child), _join(name, child), _join(real, child), exclude, depth
                )
        except OSError as error:
            raise BuildError(f"{_shown(name)} in {self.name} cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)

    def _child(
        self,
        fd: int,
        entry: str,
        info: os.stat_result,
        below: bytes,
        name: bytes,
        real: bytes,
        exclude: IgnoreRules | None,
        depth: int,
    ) -> Iterator[Entry]:
        is_directory = stat.S_ISDIR(info.st_mode)
        left_out = self._is_excluded(os.fsdecode(name), is_directory=is_directory)
        left_out = left_out or (exclude is not None and exclude.excludes(os.fsdecode(below), is_directory))
        if is_directory:
            if left_out and not self._may_hold(os.fsdecode(name), os.fsdecode(below), exclude):
                return
            self._spend(0)
            inner = self._children(
                os.open(entry, _FOLDER | os.O_CLOEXEC, dir_fd=fd), below, name, real, exclude, depth + 1
            )
            if not left_out:
                yield self._entry(DIRECTORY, below, real, info)
                yield from inner
            elif (first := next(inner, None)) is not None:
                yield self._entry(DIRECTORY, below, real, info)
                yield first
                yield from inner
        elif left_out:
            return
        elif stat.S_ISREG(info.st_mode):
            yield self._file(below, real, info)
        elif stat.S_ISLNK(info.st_mode):
            self._spend(0)
            yield self._entry(LINK, below, real, info, os.fsencode(os.readlink(entry, dir_fd=fd)))
        elif len(self.notes) < _MAX_NOTES:
            self.notes.append(f"{_shown(name)} in {self.name} is left out: it is a device, pipe or socket")

    def _file(self, below: bytes, real: bytes, info: os.stat_result) -> Entry:
        """Return a file in a directory, or a hard link to one that was there before."""
        first = self._names.setdefault((info.st_dev, info.st_ino), below) if info.st_nlink > 1 else below
        self._spend(info.st_size if first == below else 0)
        return self._entry(FILE if first == below else HARD_LINK, below, real, info, b"" if first == below else first)

    def _entry(self, kind: int, below: bytes, real: bytes, info: os.stat_result, target: bytes = b"") -> Entry:
        uid, gid = (info.st_uid, info.st_gid) if self.keeps_owners else (0, 0)
        mode = 0o777 if kind == LINK else stat.S_IMODE(info.st_mode) & _KEPT_BITS
        size = info.st_size if kind == FILE else 0
        return Entry(kind, below, real, mode, uid, gid, size, info.st_mtime_ns, _identity(info), target)

    def _is_excluded(self, path: str, *, is_directory: bool = False) -> bool:
        return self.rules is not None and self.rules.excludes(path, is_directory)

    def _is_left_out(self, path: str, exclude: IgnoreRules | None, *, is_directory: bool) -> bool:
        """Return whether a source itself is left out, with everything in it."""
        name = posixpath.basename(path)
        if is_directory:
            return self._is_excluded(path, is_directory=True) and not self._may_hold(path, name, None)
        return self._is_excluded(path) or (exclude is not None and exclude.excludes(name, False))

    def _may_hold(self, name: str, below: str, exclude: IgnoreRules | None) -> bool:
        """Return whether an excluded directory may hold something that is not excluded."""
        by_rules = self._is_excluded(name, is_directory=True)
        if by_rules and not (self.rules is not None and self.rules.may_enter(name)):
            return False
        by_option = exclude is not None and exclude.excludes(below, True)
        return not by_option or (exclude is not None and exclude.may_enter(below))

    def _matching(self, pattern: str) -> list[str]:
        """Return the paths that match a pattern."""
        found = [""]
        for part in pattern.split("/"):
            found = [path for parent in found for path in self._step(parent, part)]
        return sorted(set(found), key=os.fsencode)

    def _step(self, parent: str, part: str) -> Iterator[str]:
        """Yield the paths in a directory whose name matches one part of a pattern."""
        try:
            fd = open_in_root(self.root, os.fsencode(parent), os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return
        try:
            names = os.listdir(fd)
        finally:
            os.close(fd)
        for name in names:
            self.check()
            if globs.matches(part, name):
                yield f"{parent}/{name}".lstrip("/")


def _identity(info: os.stat_result) -> tuple[int, int, int]:
    return info.st_dev, info.st_ino, info.st_ctime_ns


def _real_path(root: int, fd: int) -> bytes:
    """Return the path below `root` that an open file has, without links on the way."""
    top, path = (os.readlink(b"/proc/self/fd/%d" % each) for each in (root, fd))
    if path == top:
        return b""
    prefix = top if top.endswith(b"/") else top + b"/"
    if not path.startswith(prefix):
        raise OSError(errno.EXDEV, "it was moved meanwhile")
    return path[len(prefix) :]


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name


def _shown(path: bytes) -> str:
    return repr(printable(os.fsdecode(path))[:200])
