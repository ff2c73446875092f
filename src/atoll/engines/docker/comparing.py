"""What is different between two file trees, each a tar archive in a file. Only read, never unpacked."""

from __future__ import annotations

import difflib
import hashlib
import tarfile
from dataclasses import dataclass
from pathlib import Path

from atoll.checkpoint import Change, ChangeKind
from atoll.errors import EngineError, SandboxResourceError

_BLOCK = 1 << 20
_MOST_ENTRIES = 5_000_000
_LONGEST_TEXT = 256 << 10
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
    wanted = {change.path.strip("/") for change in found}
    before, after = _texts(old, wanted), _texts(new, wanted)
    told = []
    for change in found:
        path = change.path.strip("/")
        one, other = before.get(path, ""), after.get(path, "")
        difference = None
        if one is not None and other is not None and one != other:
            lines = difflib.unified_diff(
                one.splitlines(keepends=True), other.splitlines(keepends=True), f"a/{path}", f"b/{path}"
            )
            difference = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
        told.append(Change(change.path, change.kind, difference))
    return told


def _texts(file: Path, wanted: set[str]) -> dict[str, str | None]:
    """None for what is no text, or too long to be shown."""
    found: dict[str, str | None] = {}
    with tarfile.open(file, "r:", errors="surrogateescape") as archive:
        for member in archive:
            path = member.name.strip("/")
            if path not in wanted or not member.isreg():
                continue
            content = archive.extractfile(member) if member.size <= _LONGEST_TEXT else None
            data = content.read() if content is not None else b"\0"
            try:
                found[path] = None if b"\0" in data else data.decode()
            except UnicodeDecodeError:
                found[path] = None
    return found
