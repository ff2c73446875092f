"""The differences between two file trees, each a tar archive in a file. The archives are read, never unpacked."""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.host.saved_states import MAX_DIFFERENCES, MAX_TEXT, Texts, keep_comparing, text_of
from atoll.errors import EngineError, SandboxResourceError
from atoll.model.checkpoint import Change, ChangeKind, Omitted
from atoll.workers import Cancellation

_BLOCK = 1 << 20
_MAX_ENTRIES = 1_000_000
_MAX_CHANGES = 200_000
_AGENT = ".atoll"


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: bytes
    mode: int
    owner: tuple[int, int]
    link: str
    digest: bytes
    size: int


def changes(old: Path, new: Path, *, text: bool, cancellation: Cancellation | None = None) -> list[Change]:
    """List the differences, sorted by path. A removed directory is listed without its contents."""
    cancellation = cancellation or Cancellation()
    try:
        before, after = _index(old, cancellation), _index(new, cancellation)
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
            if len(found) > _MAX_CHANGES:
                raise SandboxResourceError(f"the difference is too large: more than {_MAX_CHANGES} paths")
        return _with_texts(found, old, new, cancellation) if text else found
    except OverflowError as error:
        raise SandboxResourceError(f"the difference is too large: {error}") from error
    except (tarfile.TarError, OSError) as error:
        raise EngineError(f"the states cannot be compared: {error}") from error


def _index(file: Path, cancellation: Cancellation) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    with tarfile.open(file, "r:", errors="surrogateescape") as archive:
        for member in archive:
            keep_comparing(cancellation)
            path = member.name.strip("/")
            if not path or path == _AGENT or path.startswith(f"{_AGENT}/"):
                continue
            digest = hashlib.sha256()
            if member.isreg() and (content := archive.extractfile(member)) is not None:
                while block := content.read(_BLOCK):
                    keep_comparing(cancellation)
                    digest.update(block)
            found[path] = _Entry(
                member.type, member.mode, (member.uid, member.gid), member.linkname, digest.digest(), member.size
            )
            if len(found) > _MAX_ENTRIES:
                raise SandboxResourceError(f"the states have more than {_MAX_ENTRIES} files")
    return found


def _with_texts(found: list[Change], old: Path, new: Path, cancellation: Cancellation) -> list[Change]:
    """Add texts to changes in the order of their paths. Changes beyond the maximum are reported without text."""
    wanted = {change.path.strip("/") for change in found if change.kind is not ChangeKind.REMOVED}
    before, after = _texts(old, wanted), _texts(new, wanted)
    texts = Texts(MAX_DIFFERENCES, cancellation)

    def told(change: Change) -> Change:
        keep_comparing(cancellation)
        path = change.path.strip("/")
        one = before.get(path) if change.kind is ChangeKind.CHANGED else []
        other = after.get(path)
        if one is None or other is None or one == other:
            return change
        if (refusal := texts.refusal()) is not None:
            return Change(change.path, change.kind, None, refusal)
        return Change(change.path, change.kind, *texts.of(one, other, path))

    return [told(change) for change in found]


def _texts(file: Path, wanted: set[str]) -> dict[str, list[str] | Omitted]:
    """Return the lines of the wanted files, or why they are not shown."""
    found: dict[str, list[str] | Omitted] = {}
    left = MAX_DIFFERENCES
    with tarfile.open(file, "r:", errors="surrogateescape") as archive:
        for member in archive:
            path = member.name.strip("/")
            if path not in wanted or not member.isreg():
                continue
            if member.size > min(left, MAX_TEXT):
                found[path] = Omitted.SIZE
                continue
            content = archive.extractfile(member)
            if content is not None:
                found[path] = text_of(content.read())
                left -= member.size
    return found
