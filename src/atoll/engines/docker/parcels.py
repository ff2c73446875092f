"""A snapshot of the Docker engine as a file, to be moved to another one.

    one line of JSON     what it is
    a tar archive        all its files, packed with gzip
    64 hex digits, \\n   the SHA-256 of all before

The digest tells damage, not malice. A stranger's archive is unpacked by the Docker engine, as a layer of an image that
only sandboxes use; nothing in the file decides a name.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from atoll.engines.docker.commits import Saved
from atoll.errors import EngineError, ImageError
from atoll.images import strict_json

_FORMAT, _VERSION = "atoll-docker-snapshot", 1
_TRAILER = 65
_LONGEST_HEADER = 1 << 20
_BLOCK = 1 << 20
_MOST_BYTES = 32 << 30
_GZIP = 31


@dataclass(frozen=True, slots=True)
class Parcel:
    """A file that is what its digest says."""

    saved: Saved
    start: int
    end: int


def moment(text: object) -> float:
    try:
        return datetime.fromisoformat(str(text)[:26].rstrip("Z").ljust(26, "0") + "+00:00").timestamp()
    except ValueError:
        return 0.0


async def write(saved: Saved, tree: AsyncIterator[bytes], file: Path) -> None:
    """It appears as a whole, or not at all."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    header = {"format": _FORMAT, "version": _VERSION, "saved": json.loads(saved.model_dump_json())}
    digest, packer = hashlib.sha256(), zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    try:
        with await asyncio.to_thread(draft.open, "xb") as target:

            def put(data: bytes) -> None:
                digest.update(data)
                target.write(data)

            put(json.dumps(header).encode() + b"\n")
            async for piece in tree:
                await asyncio.to_thread(lambda data=piece: put(packer.compress(data)))  # type: ignore[misc]
            put(packer.flush())
            target.write(digest.hexdigest().encode() + b"\n")
            target.flush()
            await asyncio.to_thread(os.fsync, target.fileno())
        draft.rename(file)
    except OSError as error:
        raise EngineError(f"the snapshot could not be written to '{file}': {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)


def read(file: Path) -> Parcel:
    """Raises ImageError for a file that is damaged or no snapshot of this engine."""
    try:
        with file.open("rb") as content:
            return _understood(content, file)
    except OSError as error:
        raise ImageError(f"the snapshot '{file}' cannot be read: {error.strerror or error}") from error


def measure(file: Path, parcel: Parcel, most_bytes: int | None) -> None:
    """Raises ImageError if it unpacks to more than it may, before anybody unpacks it."""
    most = _MOST_BYTES if most_bytes is None else min(most_bytes, _MOST_BYTES)
    total = 0
    for piece in _plain(file, parcel):
        total += len(piece)
        if total > most:
            raise ImageError(f"the snapshot unpacks to more than {most:,} bytes")


async def pieces(file: Path, parcel: Parcel) -> AsyncIterator[bytes]:
    """Its tar archive."""
    source = _plain(file, parcel)
    while (piece := await asyncio.to_thread(next, source, None)) is not None:
        yield piece


def _plain(file: Path, parcel: Parcel) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(_GZIP)
    try:
        with file.open("rb") as content:
            content.seek(parcel.start)
            left = parcel.end - parcel.start
            while left and (block := content.read(min(left, _BLOCK))):
                left -= len(block)
                data = block
                while data:
                    if piece := unpacker.decompress(data, _BLOCK):
                        yield piece
                    data = unpacker.unconsumed_tail
            if not unpacker.eof:
                raise ImageError(f"'{file}' is damaged: its archive breaks off")
    except zlib.error as error:
        raise ImageError(f"'{file}' is damaged: {error}") from error


def _understood(content: IO[bytes], file: Path) -> Parcel:
    end = os.fstat(content.fileno()).st_size - _TRAILER
    head = content.readline(_LONGEST_HEADER)
    try:
        header: Any = strict_json.loads(head) if head.endswith(b"\n") else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != _FORMAT or end < len(head):
        raise ImageError(
            f"'{file}' is no snapshot of a Docker engine", hint="Snapshots of other engines stay with these."
        )
    if header.get("version") != _VERSION:
        raise ImageError(f"'{file}' is of another version", hint="Export it with the version that is used here.")
    content.seek(0)
    digest, left = hashlib.sha256(), end
    while left and (block := content.read(min(left, _BLOCK))):
        digest.update(block)
        left -= len(block)
    if digest.hexdigest() != content.read(_TRAILER).removesuffix(b"\n").decode(errors="replace"):
        raise ImageError(f"'{file}' is damaged: its content is not what its digest says", hint="Copy it again.")
    try:
        return Parcel(Saved.model_validate(header.get("saved")), len(head), end)
    except ValidationError as error:
        raise ImageError(f"'{file}' is no snapshot: its header makes no sense") from error
