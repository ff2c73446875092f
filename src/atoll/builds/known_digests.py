"""Digests of large files that were read before, so that a build of which everything is known need not read its context.

A file is known by its device, inode, size and times, as with git. One that was changed within the last seconds before
it was read is not remembered, because a second change could have left the same times.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path
from typing import NamedTuple

from atoll import durable

LEAST_BYTES = 64 << 10
"""Smaller files are read again, which takes no longer than looking them up."""
_MOST = 4096
_SETTLED_NS = 3_000_000_000
_MAX_FILE = 2 << 20
_LINE = re.compile(r"\d{1,20}(?: \d{1,20}){4}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class FileVersion(NamedTuple):
    """What changes with the content of a file."""

    device: int
    inode: int
    changed_ns: int
    modified_ns: int
    size: int


class KnownDigests:
    """The digests of one owner's files, in one file. Its methods block; the last process that saves wins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, str] = {}
        self._has_news = False

    def load(self) -> None:
        """Read what is known. A file that cannot be read counts as empty."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            text = self._path.read_bytes()
            found = json.loads(text) if len(text) <= _MAX_FILE else {}
            if isinstance(found, dict):
                self._found = {
                    key: value
                    for key, value in found.items()
                    if _LINE.fullmatch(key) and isinstance(value, str) and _DIGEST.fullmatch(value)
                }

    def save(self) -> None:
        if self._has_news:
            self._has_news = False
            newest = dict([*self._found.items()][-_MOST:])
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            durable.write(self._path, json.dumps(newest))

    def of(self, version: FileVersion) -> bytes | None:
        found = self._found.get(_key(version))
        return bytes.fromhex(found) if found is not None else None

    def add(self, version: FileVersion, digest: bytes, read_at_ns: int) -> None:
        """Remember the digest of a file whose reading began at that time."""
        settled = max(version.changed_ns, version.modified_ns) < read_at_ns - _SETTLED_NS
        if version.size >= LEAST_BYTES and settled:
            self._found[_key(version)] = digest.hex()
            self._has_news = True


def now_ns() -> int:
    return time.time_ns()


def _key(version: FileVersion) -> str:
    return " ".join(str(max(part, 0)) for part in version)
