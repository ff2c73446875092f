"""Compares two writable layers over the same image, as processes inside see them.

A layer holds what was written. A removed name is a character device 0/0 (a whiteout), and a directory that hides the
image's directory of the same name is marked opaque. So a path that is in only one layer may still exist in the image,
and is then reported as changed or removed, not as added.

Layers are hostile, so no link is followed and no pipe or device is opened. They must not be in use: a process that
replaced a directory with a link between two steps could lead the comparison out of the layer.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.archive.overlay import is_opaque, is_opaque_path, is_whiteout
from atoll.engines.host.saved_states import MAX_DIFFERENCES, MAX_TEXT, Texts, keep_comparing, text_of
from atoll.model.checkpoint import Change, ChangeKind, Omitted
from atoll.walking import walk
from atoll.workers import Cancellation

_BLOCK = 1 << 20
MAX_ENTRIES = 200_000
MAX_NAMES = 64 << 20
"""The maximum total length of all paths. In a deep tree, paths take more memory than everything else."""


@dataclass(frozen=True, slots=True)
class Entry:
    info: os.stat_result
    whiteout: bool
    opaque: bool

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.info.st_mode)


def changes(
    old: Path,
    new: Path,
    lowers: Sequence[Path],
    *,
    text: bool = False,
    cancellation: Cancellation | None = None,
) -> list[Change]:
    """Return the changes from one layer to the other, sorted by path.

    `lowers` are the image's root directories below both layers, topmost first. Raises OverflowError if there are too
    many files.
    """
    cancellation = cancellation or Cancellation()
    before, after = _Side(old, lowers, cancellation), _Side(new, lowers, cancellation)
    found: list[Change] = []
    removed = ""
    texts = Texts(MAX_DIFFERENCES, cancellation)

    def told(path: str, kind: ChangeKind, side: _Side | None) -> Change:
        place = after.place(path)
        if not text or place is None or not stat.S_ISREG(os.lstat(place).st_mode):
            return Change(f"/{path}", kind)
        if (refusal := texts.refusal()) is not None:
            return Change(f"/{path}", kind, None, refusal)
        return Change(
            f"/{path}", kind, *texts.of([] if side is None else _lines(side.place(path)), _lines(place), path)
        )

    for path in sorted(before.entries.keys() | after.entries.keys(), key=lambda path: path.split("/")):
        keep_comparing(cancellation)
        if removed and path.startswith(f"{removed}/"):
            continue
        one, other = before.seen(path), after.seen(path)
        if one is None and other is None:
            continue
        if other is None:
            removed = path
            found.append(Change(f"/{path}", ChangeKind.REMOVED))
        elif one is None:
            found.append(told(path, ChangeKind.ADDED, None))
        elif _differ(before, after, path, one, other):
            found.append(told(path, ChangeKind.CHANGED, before))
    return found


class _Side:
    def __init__(self, layer: Path, lowers: Sequence[Path], cancellation: Cancellation) -> None:
        self.layer, self.cancellation = layer, cancellation
        self.entries: dict[str, Entry] = {}
        self._visible: dict[str, list[Path]] = {"": list(lowers)}
        # A layer to which nothing was written has no root directory yet.
        untouched = layer.parent.is_dir() and not layer.exists()
        for path, entry in () if untouched else scan(layer):
            keep_comparing(cancellation)
            self.entries[path] = entry

    def seen(self, path: str) -> os.stat_result | None:
        """Return the status of the path as a process inside sees it, or None if it does not exist there."""
        entry = self.entries.get(path)
        if entry is not None:
            return None if entry.whiteout else entry.info
        return next((info for _, info in self._below(path)), None)

    def place(self, path: str) -> Path | None:
        """Return the host's path of the content, or None if there is none."""
        if path in self.entries:
            return self.layer / path
        return next((place for place, _ in self._below(path)), None)

    def _below(self, path: str) -> Iterator[tuple[Path, os.stat_result]]:
        for lower in self._lowers_with(path.rpartition("/")[0]):
            info = _status(lower / path)
            if info is not None and is_whiteout(info):
                return
            if info is not None:
                yield lower / path, info

    def _lowers_with(self, directory: str) -> list[Path]:
        """Return the lower roots whose directory of this name is visible inside. The results are cached, because a deep
        tree needs those of each level.

        A root in which a part of the path is a link is left out, because an overlay does not merge what is behind a
        link.
        """
        unknown = []
        while directory not in self._visible:
            unknown.append(directory)
            directory = directory.rpartition("/")[0]
        visible = self._visible[directory]
        for name in reversed(unknown):
            entry = self.entries.get(name)
            hidden = entry is not None and (entry.whiteout or entry.opaque or not entry.is_directory)
            visible = [] if hidden else _merged(visible, name)
            self._visible[name] = visible
        return visible


def _merged(lowers: Sequence[Path], name: str) -> list[Path]:
    """Return the lower roots whose directory of this name is visible: those above the first that hides the rest."""
    found = []
    for lower in lowers:
        info = _status(lower / name)
        if info is None:
            continue
        if not stat.S_ISDIR(info.st_mode):
            break
        found.append(lower)
        if is_opaque_path(lower / name):
            break
    return found


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def scan(root: Path) -> Iterator[tuple[str, Entry]]:
    """Yield everything that was written to a layer, by path. Raises OverflowError if there are too many files."""
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # nothing has been written yet
    count = length = 0
    try:
        for found in walk(fd):
            count += 1
            length += len(found.path)
            if count > MAX_ENTRIES:
                raise OverflowError(f"more than {MAX_ENTRIES:,} files were written")
            if length > MAX_NAMES:
                raise OverflowError(f"the paths of the files that were written are longer than {MAX_NAMES:,} bytes")
            whiteout = is_whiteout(found.info)
            opaque = found.is_directory and is_opaque(found.parent, found.name)
            yield os.fsdecode(found.path), Entry(found.info, whiteout, opaque)
    finally:
        os.close(fd)


def _differ(before: _Side, after: _Side, path: str, one: os.stat_result, other: os.stat_result) -> bool:
    if path not in before.entries and path not in after.entries:
        return False
    if (one.st_mode, one.st_uid, one.st_gid) != (other.st_mode, other.st_uid, other.st_gid):
        return True
    if stat.S_ISDIR(one.st_mode):
        return False  # its entries are compared one by one
    if one.st_size != other.st_size or one.st_rdev != other.st_rdev:
        return True
    # A saved state has the inode numbers and times of its layer, and no process inside can set the change time (ctime).
    if (one.st_ino, one.st_mtime_ns, one.st_ctime_ns) == (other.st_ino, other.st_mtime_ns, other.st_ctime_ns):
        return False
    old, new = before.place(path), after.place(path)
    if old is None or new is None:
        return True
    if stat.S_ISLNK(one.st_mode):
        return _link(old) != _link(new)
    return stat.S_ISREG(one.st_mode) and not _same_content(old, new, after.cancellation)


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _open(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    return None


def _same_content(old: Path, new: Path, cancellation: Cancellation) -> bool:
    one, other = _open(old), _open(new)
    try:
        if one is None or other is None:
            return False
        while True:
            keep_comparing(cancellation)
            block = os.read(one, _BLOCK)
            if block != os.read(other, _BLOCK):
                return False
            if not block:
                return True
    finally:
        for fd in (one, other):
            if fd is not None:
                os.close(fd)


def _lines(path: Path | None) -> list[str] | Omitted:
    fd = _open(path) if path is not None else None
    if fd is None:
        return Omitted.BINARY
    with os.fdopen(fd, "rb") as file:
        return text_of(file.read(MAX_TEXT + 1))
