"""The context of a build as an archive, for a server: what `.dockerignore` leaves of a directory, piece by piece.

The directory is the user's own. No link in it is followed; links are sent as links. Devices, pipes and sockets are left
out, and so are owners, because the files that a build copies belong to root anyway.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from atoll.builds.dockerfile.ignore import IgnoreRules
from atoll.errors import SpecError

_CHUNK = 1 << 20
_MAX_DEPTH = 120
_MAX_NOTES = 20
_MAX_RULES = 4 << 20


def pieces(context: Path, dockerfile: str, left_out: list[str]) -> Iterator[bytes]:
    """Yield the archive, which never exists as a whole. The first paths that are neither files, directories nor links
    are added to `left_out`. Raises SpecError for what cannot be read."""
    rules = ignore_rules(context, dockerfile)
    always = {os.path.normpath(dockerfile), f"{os.path.normpath(dockerfile)}.dockerignore", ".dockerignore"}
    held = bytearray()
    for piece in _entries(context, "", rules, always, left_out):
        held += piece
        if len(held) >= _CHUNK:
            yield bytes(held)
            held.clear()
    held += bytes(2 * tarfile.BLOCKSIZE)
    yield bytes(held)


def ignore_rules(context: Path, dockerfile: str) -> IgnoreRules:
    """Return the rules of a context. Those beside its Dockerfile come before those of the whole context."""
    for name in (f"{dockerfile}.dockerignore", ".dockerignore"):
        try:
            with (context / name).open("rb") as file:
                text = file.read(_MAX_RULES + 1)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _unreadable(name, error) from error
        if len(text) > _MAX_RULES:
            raise SpecError(f"'{name}' has more than {_MAX_RULES:,} bytes")
        return IgnoreRules.parse(text)
    return IgnoreRules.parse(b"")


def _entries(context: Path, below: str, rules: IgnoreRules, always: set[str], left_out: list[str]) -> Iterator[bytes]:
    if below.count("/") >= _MAX_DEPTH:
        raise SpecError(f"the context is more than {_MAX_DEPTH} directories deep: '{below[:80]}…'")
    try:
        with os.scandir(context / below) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise _unreadable(below or ".", error) from error
    for entry in entries:
        path = f"{below}/{entry.name}" if below else entry.name
        is_directory = entry.is_dir(follow_symlinks=False)
        is_excluded = rules.excludes(path, is_directory) and path not in always
        if is_directory:
            if not rules.may_enter(path) and not any(each.startswith(f"{path}/") for each in always):
                continue
            below_it = _entries(context, path, rules, always, left_out)
            if not is_excluded:
                yield _head(path, entry.stat(follow_symlinks=False))
            yield from below_it
        elif not is_excluded:
            yield from _entry(context / path, path, left_out)


def _entry(place: Path, path: str, left_out: list[str]) -> Iterator[bytes]:
    try:
        info = place.lstat()
        if stat.S_ISLNK(info.st_mode):
            yield _head(path, info, os.readlink(place))
        elif stat.S_ISREG(info.st_mode):
            yield from _file(place, path)
        elif len(left_out) < _MAX_NOTES:
            left_out.append(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _file(place: Path, path: str) -> Iterator[bytes]:
    with open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
        info = os.fstat(file.fileno())
        yield _head(path, info)
        left = info.st_size
        while left and (data := file.read(min(_CHUNK, left))):
            left -= len(data)
            yield data
        if left:
            raise SpecError(f"'{path}' in the context became shorter while it was read", hint="Build again.")
        yield bytes(-info.st_size % tarfile.BLOCKSIZE)


def _head(path: str, info: os.stat_result, target: str = "") -> bytes:
    member = tarfile.TarInfo(path)
    member.mode, member.mtime = stat.S_IMODE(info.st_mode), info.st_mtime
    if stat.S_ISREG(info.st_mode):
        member.size = info.st_size
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, target
    else:
        member.type = tarfile.DIRTYPE
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _unreadable(path: str, error: OSError) -> SpecError:
    return SpecError(
        f"'{path}' in the context cannot be read: {error.strerror or error}",
        hint="Correct its permissions, or name it in .dockerignore.",
    )
