"""What is different between two file trees, each a tar archive in a file. Only read, never unpacked."""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import dataclass
from pathlib import Path

from atoll.checkpoint import Change, ChangeKind
from atoll.engines.local.states import LARGEST_TEXT, MOST_TEXT, difference, lines_of
from atoll.errors import EngineError, SandboxResourceError

_BLOCK = 1 << 20
_MOST_ENTRIES = 1_000_000
_MOST_CHANGES = 200_000
_AGENT = ".atoll"


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: bytes
    mode: int
    owner: tuple[int, int]
    link: str
    digest: bytes
    size: int


def changes(old: Path, new: Path, *, text: bool) -> list[Change]:
    """By path. Of a directory that was removed only the directory itself is told."""
    try:
        before, after = _index(old), _index(new)
        found: list[Change] = []
        gone = ""
        for path in sorted(before.keys() | after.keys(), key=lambda name: name.split("/")):
            if before.get(path) == after.get(path) or (gone and path.startswith(gone) and path not in after):
                continue
            if path not in after:
                gone, kind = f"{path}/", ChangeKind.REMOVED
            else:
                kind = ChangeKind.CHANGED if path in before else ChangeKind.ADDED
            found.append(Change(f"/{path}", kind))
            if len(found) > _MOST_CHANGES:
                raise SandboxResourceError(f"the difference is too large: more than {_MOST_CHANGES} paths")
        return _with_texts(found, old, new) if text else found
    except (tarfile.TarError, OSError) as error:
        raise EngineError(f"the states cannot be compared: {error}") from error


def _index(file: Path) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    with tarfile.open(file, "r:", errors="surrogateescape") as archive:
        for member in archive:
            path = member.name.strip("/")
            if not path or path == _AGENT or path.startswith(f"{_AGENT}/"):
                continue
            digest = hashlib.sha256()
            if member.isreg() and (content := archive.extractfile(member)) is not None:
                while block := content.read(_BLOCK):
                    digest.update(block)
            found[path] = _Entry(
                member.type, member.mode, (member.uid, member.gid), member.linkname, digest.digest(), member.size
            )
            if len(found) > _MOST_ENTRIES:
                raise SandboxResourceError(f"the states have more than {_MOST_ENTRIES} files")
    return found


def _with_texts(found: list[Change], old: Path, new: Path) -> list[Change]:
    """Those come first that come first by path; what is beyond the bound is told without its text."""
    wanted = {change.path.strip("/") for change in found if change.kind is not ChangeKind.REMOVED}
    before, after = _texts(old, wanted), _texts(new, wanted)
    told, left = [], MOST_TEXT
    for change in found:
        path, words = change.path.strip("/"), None
        one = before.get(path) if change.kind is ChangeKind.CHANGED else []
        other = after.get(path)
        if left > 0 and one is not None and other is not None and one != other:
            words = difference(one, other, path)
            left -= len(words)
        told.append(Change(change.path, change.kind, words))
    return told


def _texts(file: Path, wanted: set[str]) -> dict[str, list[str]]:
    """The lines of those that are text and not too long to be shown, as many as are held in memory."""
    found: dict[str, list[str]] = {}
    left = MOST_TEXT
    with tarfile.open(file, "r:", errors="surrogateescape") as archive:
        for member in archive:
            path = member.name.strip("/")
            if path not in wanted or not member.isreg() or member.size > min(left, LARGEST_TEXT):
                continue
            content = archive.extractfile(member)
            lines = lines_of(content.read()) if content is not None else None
            if lines is not None:
                found[path] = lines
                left -= member.size
    return found
