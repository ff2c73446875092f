"""Operations on an unpacked root file system: prepare its mount points, measure and digest it, remove it."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from atoll.archive.overlay import is_opaque, is_whiteout, mark_opaque
from atoll.archive.root import Root
from atoll.archive.work import Work
from atoll.errors import ImageError
from atoll.removal import remove_tree
from atoll.walking import walk

MOUNT_POINTS = {"dev": 0o755, "proc": 0o555, "sys": 0o555, "etc": 0o755, "tmp": 0o1777, "run": 0o755}
"""Directories that engines mount over or write to. If they were links, a careless OCI runtime could reach the host."""
_EMPTIED = ("dev", "proc", "sys")
_CHUNK = 1 << 20
_MAX_DEPTH = 512
"""The maximum depth of a tree. It exceeds the depth of names in an archive, because links allow deeper trees."""


@dataclass(frozen=True, slots=True)
class Measure:
    """The size and digest of a tree. The digest covers path, type, mode, owner, size and content of every entry, but
    not its times."""

    digest: str
    size_bytes: int
    entries: int


def settle(path: Path) -> None:
    """Create missing mount points, and refuse those that are not real directories.

    The content of /dev, /proc and /sys is removed: mounts hide it in every sandbox, and outside of one it would only be
    misleading.
    """
    with Root(path) as root:
        for name, mode in MOUNT_POINTS.items():
            parts = (name.encode(),)
            info = root.lstat(parts)
            if info is None:
                os.mkdir(name, 0o700, dir_fd=root.fd)
                os.chmod(name, mode, dir_fd=root.fd)
            elif not stat.S_ISDIR(info.st_mode):
                raise _no_directory(name, info)
            elif name in _EMPTIED:
                for child in os.listdir(root.directory(parts)):
                    root.remove((*parts, os.fsencode(child)))


def settle_layer(path: Path) -> None:
    """Do what `settle` does with a layer that lies on a settled tree.

    A mount point that the layer removes becomes an empty directory.
    """
    with Root(path) as root:
        for name, mode in MOUNT_POINTS.items():
            parts = (name.encode(),)
            info = root.lstat(parts)
            if info is None:
                continue
            if is_whiteout(info):
                root.remove(parts)
                os.mkdir(name, 0o700, dir_fd=root.fd)
                mark_opaque(root.directory(parts))
                os.chmod(name, mode, dir_fd=root.fd)
            elif not stat.S_ISDIR(info.st_mode):
                raise _no_directory(name, info)
            elif name in _EMPTIED:
                root.remove(parts)


def _no_directory(name: str, info: os.stat_result) -> ImageError:
    what = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "a file"
    return ImageError(f"/{name} of the image is {what}, not a directory", hint="Such an image is broken or hostile.")


def measure(path: Path, work: Work, *, layer: bool = False) -> Measure:
    """Read a whole tree. The digest is a SHA-256 of one record for each entry, in the order of a sorted walk.

    With `layer`, the tree lies on another one, and what it removes and hides of that one is part of the digest.
    """
    total, entries = 0, 0
    links: dict[int, bytes] = {}
    digest = hashlib.sha256(b"atoll-tree-1\n")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for parent, name, path_below, info in walk(fd):
            work.check()
            if path_below.count(b"/") >= _MAX_DEPTH:
                raise ImageError(
                    f"the image has more than {_MAX_DEPTH} directories in one another",
                    hint="Such an image is broken or hostile.",
                )
            size, mode = info.st_size, stat.S_IMODE(info.st_mode)
            if stat.S_ISREG(info.st_mode):
                kind, content = b"f", links.get(info.st_ino)
                if content is None:
                    content = _hash_file(parent, name, work)
                    total += size
                    if info.st_nlink > 1:
                        links[info.st_ino] = content
            elif stat.S_ISLNK(info.st_mode):
                kind, content = b"l", hashlib.sha256(os.fsencode(os.readlink(name, dir_fd=parent))).digest()
            elif stat.S_ISDIR(info.st_mode):
                kind, content, size = b"o" if layer and is_opaque(parent, name) else b"d", b"", 0
            elif layer and is_whiteout(info):
                kind, content, size, mode = b"w", b"", 0, 0
            else:
                raise ImageError(f"the image holds a device, pipe or socket, {ascii(name)[:120]}")
            entries += 1
            fields = b"%s %o %d %d %d " % (kind, mode, info.st_uid, info.st_gid, size)
            digest.update(fields + content.hex().encode() + b"\0/" + path_below + b"\0")
            if entries % 2000 == 0:
                work.report("check", "reading files", total)
    finally:
        os.close(fd)
    return Measure(f"sha256:{digest.hexdigest()}", total, entries)


def _hash_file(parent: int, name: str, work: Work) -> bytes:
    digest = hashlib.sha256()
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=parent), "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if len(chunk) == _CHUNK:
                work.check()
    return digest.digest()


def remove(path: Path) -> None:
    """Remove a tree of any depth, even if it has directories that their owner may not write to. May be repeated."""
    remove_tree(path)
