"""Atomic writes: a file has either its old or its new content, even if the writer dies at any moment.

New content is written to a draft in the same directory, which is then renamed. A draft is named `.NAME.RANDOM.PID`: it
is hidden, unique to its writer, and ends with the writer's process id, so that drafts of dead writers can be found and
removed. Earlier versions used `.NAME.PID`, which is recognized, too.

The content survives a crash of the machine only with `sync`. Waiting for the disk takes milliseconds, so `sync` is not
used for files that matter only until the next boot, such as those of running sandboxes.
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
    """The name of the file or directory that it would have replaced."""


def write(path: str | Path, content: str | bytes, mode: int = 0o600, *, sync: bool = False) -> None:
    """Replace or create a file with exactly this mode. If this raises OSError, nothing has changed."""
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
    """Create a file unless it exists, and return whether it was created. Of concurrent callers only one succeeds.

    Raises OSError.
    """
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
    """Provide the path of a draft. The file that the block creates there replaces `path` when the block ends; if the
    block fails, the draft is removed."""
    name = draft_path(path)
    try:
        yield Path(name)
        os.replace(name, path)
    except BaseException:
        _discard(name)
        raise


def directory_once(path: Path, make: Work, remove: Work = _remove_tree) -> None:
    """Create a directory atomically, with its content, unless it exists. The first of concurrent processes wins."""
    if path.is_dir():
        return
    draft = Path(draft_path(path))
    try:
        make(draft)
        try:
            draft.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        if draft.exists():
            remove(draft)


def draft_path(path: str | Path) -> str:
    """Return the path of a new draft, for a caller that creates, renames and removes it itself, such as a directory."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{os.urandom(4).hex()}.{os.getpid()}")


def abandoned(directory: Path) -> list[Draft]:
    """Return the drafts in this directory whose writers are dead."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    found = [(name, match) for name in names if (match := _DRAFT.fullmatch(name)) is not None]
    return [Draft(directory / name, match["name"]) for name, match in found if not _is_alive(match["writer"])]


def remove_abandoned(directory: Path, remove: Work = os.unlink) -> None:
    """Remove the drafts of dead writers. Pass `remove` if the drafts are directories."""
    for each in abandoned(directory):
        with suppress(FileNotFoundError):  # another process does the same
            remove(each.path)


def sync_directory(path: str | Path) -> None:
    """Wait until the entries of a directory are on disk."""
    fd = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_new(path: str | Path, content: str | bytes, mode: int = 0o600, *, sync: bool = False) -> None:
    """Create a file without a draft. It is visible while incomplete, so use this only in the draft of a directory."""
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
