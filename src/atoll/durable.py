"""Files that are either as before or as meant, whenever the writer dies.

What is to appear is written to a draft beside it, which then takes its place in one step. A draft is named
`.NAME.RANDOM.PID`: hidden, never the same for two writers, and ending with the number of the writing process, so that
drafts of dead writers are found and removed. Versions before this one also wrote `.NAME.PID`, which is read as well.

Only where `sync` is given does the content outlast a crash of the machine. Waiting for the disk takes milliseconds, so
nothing that belongs to a sandbox of this boot asks for it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_DRAFT = re.compile(r"\.(?P<name>.+?)(?:\.[0-9a-f]{8})?\.(?P<writer>[0-9]{1,10})", re.DOTALL)
Work = Callable[[Path], object]
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def _remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


class Draft(NamedTuple):
    path: Path
    name: str
    """The name of what it was to become."""


def write(path: str | Path, content: str | bytes, mode: int = 0o600, *, sync: bool = False) -> None:
    """Replace a file, or make it, with exactly this mode. Raises OSError, and then nothing has changed."""
    draft = draft_path(path)
    try:
        write_new(draft, content, mode, sync=sync)
        os.replace(draft, path)
    except BaseException:
        _discard(draft)
        raise
    if sync:
        sync_directory(os.path.dirname(path))


def create(path: str | Path, content: str | bytes, mode: int = 0o600, *, sync: bool = False) -> bool:
    """Make a file unless there is one; of several who try at once, one succeeds. Raises OSError."""
    draft = draft_path(path)
    try:
        write_new(draft, content, mode, sync=sync)
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        _discard(draft)
    if sync:
        sync_directory(os.path.dirname(path))
    return True


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """The name of a draft, for what is more than a few bytes. What the block makes there replaces `path` at its end; if
    the block fails, the draft is removed."""
    name = draft_path(path)
    try:
        yield Path(name)
        os.replace(name, path)
    except BaseException:
        _discard(name)
        raise


def directory_once(path: Path, make: Work, remove: Work = _remove_tree) -> None:
    """Make a directory that appears as a whole, unless it is there. If another process is faster, its work is kept."""
    if path.is_dir():
        return
    draft = Path(draft_path(path))
    try:
        make(draft)
        with suppress(OSError):
            draft.rename(path)
    finally:
        if draft.exists():
            remove(draft)


def draft_path(path: str | Path) -> str:
    """The name of a new draft of this path, for a caller that makes, renames and removes it itself: a directory."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{os.urandom(4).hex()}.{os.getpid()}")


def abandoned(directory: Path) -> list[Draft]:
    """The drafts in this directory whose writers are dead."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = [(name, match) for name in names if (match := _DRAFT.fullmatch(name)) is not None]
    return [Draft(directory / name, match["name"]) for name, match in found if not _is_alive(match["writer"])]


def remove_abandoned(directory: Path, remove: Work = os.unlink) -> None:
    """Remove the drafts of dead writers; `remove` is for drafts that are directories."""
    for each in abandoned(directory):
        with suppress(FileNotFoundError):  # another process does the same
            remove(each.path)


def sync_directory(path: str | Path) -> None:
    """Wait until the names in a directory are on the disk."""
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_new(path: str | Path, content: str | bytes, mode: int = 0o600, *, sync: bool = False) -> None:
    """Make a file where nobody looks yet, as in the draft of a directory: it grows before everybody's eyes."""
    fd = os.open(path, _CREATE, mode)
    try:
        if mode & 0o077:
            os.fchmod(fd, mode)
        left = memoryview(content.encode() if isinstance(content, str) else content)
        while left:
            left = left[os.write(fd, left) :]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _discard(draft: str) -> None:
    with suppress(OSError):
        os.unlink(draft)


def _is_alive(process: str) -> bool:
    return os.path.exists(f"/proc/{int(process)}")
