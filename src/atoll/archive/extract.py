"""Unpacking of untrusted tar archives.

Names are split into components; `..` is refused, and a leading slash means the root of the image. The kernel opens the
parent inside the root (see `root.py`). The last component is created with calls that neither follow a link nor reuse an
existing file: existing files are removed first, so nothing is ever written *through* a link or file. Entries of an
archive become:

    directories, regular files     the same, with permission bits only
    symbolic links                 the same, unchanged; they are resolved only inside a sandbox
    hard links                     hard links to regular files of the image
    devices, pipes                 nothing: skipped and counted, because sandboxes get their own /dev
    extended attributes            nothing: the kernel would obey file capabilities and overlayfs markers
    whiteouts `.wh.*`              the removal of files of lower layers; no marker is left

Set-uid and set-gid bits are stripped. Sandboxes run with `no_new_privs`, so the bits would have no effect inside, and
on the host's disk, outside of a sandbox, they could only do harm.

As root, owners are kept (0 to 65535; others become nobody), because sandboxes map these ids. Otherwise, all files
belong to the caller.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field

from atoll import sparse
from atoll.archive.archive_limits import Budget
from atoll.archive.decompress import Reader
from atoll.archive.root import Root
from atoll.archive.tar_stream import Member, TarStream, Type
from atoll.archive.work import Work
from atoll.errors import ImageError

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOBODY = 65534
_MAX_ID = 65535
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_REPORT_EVERY = 8 << 20
_SKIPPED = (Type.CHARACTER_DEVICE, Type.BLOCK_DEVICE, Type.FIFO)

Parts = tuple[bytes, ...]


@dataclass(slots=True)
class Extraction:
    """The parts of an archive that were left out."""

    devices_skipped: int = 0
    set_ids_stripped: int = 0
    notes: list[str] = field(default_factory=list)
    """Messages about the first 20 of them."""

    def note(self, text: str) -> None:
        if len(self.notes) < 20:
            self.notes.append(text)


def extract(
    reader: Reader,
    root: Root,
    budget: Budget,
    work: Work,
    *,
    require_end: bool = True,
    whiteouts: bool = True,
    detail: str = "image",
) -> Extraction:
    """Unpack one uncompressed tar stream over the existing content of the root, as the next layer of an image.

    Raises ImageError for anything it refuses; the root is then incomplete and must be discarded. `require_end` is off
    if a digest proves that the stream is complete, because some builders leave out the end mark. Without `whiteouts`,
    names that begin with `.wh.` are ordinary names.
    """
    return _Layer(root, budget, work, detail, whiteouts).apply(TarStream(reader, budget, require_end=require_end))


class _Layer:
    def __init__(self, root: Root, budget: Budget, work: Work, detail: str, whiteouts: bool) -> None:
        self._root, self._budget, self._work, self._detail = root, budget, work, detail
        self._whiteouts = whiteouts
        self._is_root_user = os.geteuid() == 0
        self._made: set[Parts] = set()
        self._directories: dict[Parts, Member] = {}
        self._skipped: set[Parts] = set()
        self._reported = 0
        self._result = Extraction()

    def apply(self, archive: TarStream) -> Extraction:
        for member in archive:
            self._work.check()
            try:
                self._apply(member, archive)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
                    raise
                raise ImageError(f"the entry {shown(member.name)} cannot be unpacked: {error.strerror}") from error
        self._finish_directories()
        return self._result

    def _apply(self, member: Member, archive: TarStream) -> None:
        parts = self._parts(member.name)
        if not parts:
            if member.type is not Type.DIRECTORY:
                raise ImageError("the archive replaces the root directory by something else")
            self._directories[()] = member
            return
        if self._whiteouts and any(part.startswith(_WHITEOUT) for part in parts):
            self._whiteout(parts)
        elif member.type in _SKIPPED:
            self._skip(parts, member)
        elif member.type is Type.DIRECTORY:
            self._directory(parts, member)
        else:
            parent = self._parent(parts)
            if member.type is Type.FILE:
                self._file(parent, parts, member, archive)
            elif member.type is Type.SYMLINK:
                self._symlink(parent, parts, member)
            else:
                self._hard_link(parts, member)
            self._made.add(parts)

    def _parts(self, name: bytes) -> Parts:
        limits = self._budget.limits
        if len(name) > limits.path_bytes:
            raise ImageError(f"the name {shown(name)} is longer than {limits.path_bytes} bytes")
        parts = tuple(part for part in name.split(b"/") if part and part != b".")
        if b".." in parts:
            raise ImageError(f"the name {shown(name)} leads out of the image")
        if len(parts) > limits.depth:
            raise ImageError(f"the name {shown(name)} is more than {limits.depth} directories deep")
        return parts

    def _parent(self, parts: Parts) -> int:
        """Return a descriptor of the directory that an entry goes into. Missing directories are created."""
        try:
            return self._root.directory(parts[:-1])
        except FileNotFoundError:
            pass
        for end in range(1, len(parts)):
            prefix = parts[:end]
            try:
                parent = self._root.directory(prefix)
            except FileNotFoundError:
                self._budget.spend_entry()
                try:
                    os.mkdir(prefix[-1], 0o700, dir_fd=self._root.directory(prefix[:-1]))
                except FileExistsError:
                    raise ImageError(
                        f"the entry {shown(b'/'.join(parts))} is below a link whose target does not exist"
                    ) from None
                self._directories[prefix] = Member(b"", Type.DIRECTORY, 0o755, 0, 0, 0, 0, b"")
                self._made.add(prefix)
                parent = self._root.directory(prefix)
        return parent

    def _clear(self, parts: Parts) -> None:
        """Remove an existing file or tree that an entry replaces."""
        self._root.remove(parts)
        self._directories.pop(parts, None)

    def _file(self, parent: int, parts: Parts, member: Member, archive: TarStream) -> None:
        try:
            fd = os.open(parts[-1], _CREATE, 0o600, dir_fd=parent)
        except FileExistsError:
            self._clear(parts)
            fd = os.open(parts[-1], _CREATE, 0o600, dir_fd=self._root.directory(parts[:-1]))
        try:
            for chunk in archive.data():
                self._budget.spend_room(sparse.write(fd, chunk))
                if member.size > len(chunk):
                    self._work.check()
            sparse.end(fd)
            self._own(fd, member)
            os.fchmod(fd, self._mode(member))
            os.utime(fd, (member.mtime, member.mtime))
        finally:
            os.close(fd)
        if self._budget.bytes_used - self._reported >= _REPORT_EVERY:
            self._reported = self._budget.bytes_used
            self._work.report("extract", self._detail, self._budget.bytes_used)

    def _symlink(self, parent: int, parts: Parts, member: Member) -> None:
        if not member.link or len(member.link) > self._budget.limits.path_bytes:
            raise ImageError(f"the link {shown(member.name)} has a target that is empty or too long")
        try:
            os.symlink(member.link, parts[-1], dir_fd=parent)
        except FileExistsError:
            self._clear(parts)
            parent = self._root.directory(parts[:-1])
            os.symlink(member.link, parts[-1], dir_fd=parent)
        if self._is_root_user:
            os.chown(parts[-1], _id(member.uid), _id(member.gid), dir_fd=parent, follow_symlinks=False)

    def _hard_link(self, parts: Parts, member: Member) -> None:
        target = self._parts(member.link)
        if target in self._skipped:
            self._skip(parts, member)
            return
        info = self._root.lstat(target) if target else None
        if info is None or not stat.S_ISREG(info.st_mode):
            raise ImageError(f"the hard link {shown(member.name)} has no regular file of the image as its target")
        existing = self._root.lstat(parts)
        if existing is not None:
            if (existing.st_dev, existing.st_ino) == (info.st_dev, info.st_ino):
                return
            self._clear(parts)
        source, parent = self._root.directory(target[:-1]), self._root.directory(parts[:-1])
        os.link(target[-1], parts[-1], src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)

    def _directory(self, parts: Parts, member: Member) -> None:
        parent = self._parent(parts)
        try:
            os.mkdir(parts[-1], 0o700, dir_fd=parent)
        except FileExistsError:
            info = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISDIR(info.st_mode):
                self._clear(parts)
                os.mkdir(parts[-1], 0o700, dir_fd=self._root.directory(parts[:-1]))
        self._directories[parts] = member
        self._made.add(parts)

    def _skip(self, parts: Parts, member: Member) -> None:
        """Skip a device or pipe, and remove a file of a lower layer that it replaces."""
        self._skipped.add(parts)
        self._result.devices_skipped += 1
        self._result.note(f"skipped the {member.type.name.lower().replace('_', ' ')} {shown(member.name)}")
        if self._root_has(parts):
            self._clear(parts)

    def _whiteout(self, parts: Parts) -> None:
        name = parts[-1]
        if any(part.startswith(_WHITEOUT) for part in parts[:-1]):
            raise ImageError(f"the archive has an entry below a whiteout, {shown(b'/'.join(parts))}")
        if name == _OPAQUE:
            self._empty(parts[:-1])
        elif not name.startswith(_WHITEOUT * 2):
            target = (*parts[:-1], name.removeprefix(_WHITEOUT))
            if target[-1] in (b"", b".", b".."):
                raise ImageError(f"the archive has an invalid whiteout, {shown(b'/'.join(parts))}")
            if target not in self._made and self._root_has(target):
                self._clear(target)

    def _empty(self, parts: Parts) -> None:
        """Remove everything from a directory that does not come from this layer."""
        info = self._root.lstat(parts) if not parts or self._root_has(parts) else None
        if info is None or not stat.S_ISDIR(info.st_mode):
            return
        for name in os.listdir(self._root.directory(parts)):
            child = (*parts, os.fsencode(name))
            if child not in self._made:
                self._clear(child)
            else:
                self._empty(child)

    def _root_has(self, parts: Parts) -> bool:
        try:
            return self._root.lstat(parts) is not None
        except OSError:
            return False

    def _finish_directories(self) -> None:
        """Set modes, owners and times of the directories.

        This comes last: creating entries changes times, and a read-only mode would stop anyone but root.
        """
        for parts in sorted(self._directories, key=len, reverse=True):
            member = self._directories[parts]
            info = self._root.lstat(parts)
            if info is None or not stat.S_ISDIR(info.st_mode):
                continue
            fd = self._root.directory(parts)
            self._own(fd, member)
            os.fchmod(fd, self._mode(member))
            os.utime(fd, (member.mtime, member.mtime))

    def _own(self, fd: int, member: Member) -> None:
        if self._is_root_user:
            os.fchown(fd, _id(member.uid), _id(member.gid))

    def _mode(self, member: Member) -> int:
        if member.type is Type.DIRECTORY:
            return (member.mode & 0o1777) | (0 if self._is_root_user else 0o700)
        if member.mode & 0o6000:
            self._result.set_ids_stripped += 1
            self._result.note(f"stripped the set-id bits of {shown(member.name)}")
        return (member.mode & 0o777) | (0 if self._is_root_user else 0o400)


def _id(number: int) -> int:
    return number if number <= _MAX_ID else _NOBODY


def shown(name: bytes) -> str:
    """Return a name for a message: one line, printable and of limited length."""
    return ascii(os.fsdecode(name[:120]))[:200]
