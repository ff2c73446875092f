"""The outside of a snapshot in a file: a line of JSON, the content, and the SHA-256 of both as 64 hex digits and \\n.

The digest tells damage, not malice: whoever made the file made the digest too.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO, Any

from atoll.archive import strict_json
from atoll.errors import ImageError

TRAILER_BYTES = 65
_BLOCK = 1 << 20


def read_header(content: IO[bytes], kind: str, most_bytes: int) -> tuple[dict[str, Any], int, int] | None:
    """The header, and where the content begins and ends. None: it is no file of this kind."""
    end = os.fstat(content.fileno()).st_size - TRAILER_BYTES
    head = content.readline(most_bytes)
    try:
        header: Any = strict_json.loads(head) if head.endswith(b"\n") else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != kind or end < len(head):
        return None
    return header, len(head), end


def check_version(file: Path, header: dict[str, Any], *known: int) -> None:
    if header.get("version") not in known:
        raise ImageError(f"'{file}' is of another version", hint="Export it with the version that is used here.")


def check_digest(content: IO[bytes], file: Path, end: int) -> None:
    content.seek(0)
    digest, left = hashlib.sha256(), end
    while left and (block := content.read(min(left, _BLOCK))):
        digest.update(block)
        left -= len(block)
    if digest.hexdigest() != content.read(TRAILER_BYTES).removesuffix(b"\n").decode(errors="replace"):
        raise ImageError(f"'{file}' is damaged: its content is not what its digest says", hint="Copy it again.")
