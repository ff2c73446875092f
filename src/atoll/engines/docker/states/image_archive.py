"""A snapshot of a Docker engine as a file, for use with another one.

    one line of JSON     the description of the snapshot
    a tar archive        all its files, compressed with gzip
    64 hex digits, \\n   the SHA-256 of everything before

The digest detects damage, not manipulation. An archive from a stranger is unpacked by the Docker engine, as a layer of
an image that only sandboxes use; no name is taken from the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from atoll import durable, workers
from atoll.engines.docker.states.commits import SavedState
from atoll.engines.host.saved_states import check_snapshot_digest, check_snapshot_version, read_snapshot_header
from atoll.errors import EngineError, ImageError

_FORMAT, _VERSION = "atoll-docker-snapshot", 1
_MAX_HEADER_BYTES = 1 << 20
_BLOCK = 1 << 20
_MAX_BYTES = 32 << 30
_GZIP = 31


@dataclass(frozen=True, slots=True)
class ImageArchive:
    """A file whose digest is correct."""

    saved: SavedState
    start: int
    end: int


def moment(text: object) -> float:
    try:
        return datetime.fromisoformat(str(text)[:26].rstrip("Z").ljust(26, "0") + "+00:00").timestamp()
    except ValueError:
        return 0.0


async def write(saved: SavedState, tree: AsyncIterator[bytes], file: Path) -> None:
    """Write a snapshot to a file, atomically: the file appears complete or not at all."""
    header = {"format": _FORMAT, "version": _VERSION, "saved": json.loads(saved.model_dump_json())}
    digest, packer = hashlib.sha256(), zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    try:
        with durable.draft(file) as draft, await workers.run(workers.TRANSFER, draft.open, "xb") as target:

            def put(data: bytes) -> None:
                digest.update(data)
                target.write(data)

            put(json.dumps(header).encode() + b"\n")
            async for piece in tree:
                await workers.run(workers.TRANSFER, lambda data=piece: put(packer.compress(data)))  # type: ignore[misc]
            put(packer.flush())
            target.write(digest.hexdigest().encode() + b"\n")
            target.flush()
            await workers.run(workers.TRANSFER, os.fsync, target.fileno())
    except OSError as error:
        raise EngineError(f"the snapshot could not be written to '{file}': {error.strerror or error}") from error


def read(file: Path) -> ImageArchive:
    """Read the description of a snapshot. Raises ImageError if the file is damaged or no snapshot of this engine."""
    try:
        with file.open("rb") as content:
            return _understood(content, file)
    except OSError as error:
        raise ImageError(f"the snapshot '{file}' cannot be read: {error.strerror or error}") from error


def measure(file: Path, incoming: ImageArchive, most_bytes: int | None) -> None:
    """Raise ImageError if a snapshot would unpack to more than the maximum, before it is unpacked."""
    most = _MAX_BYTES if most_bytes is None else min(most_bytes, _MAX_BYTES)
    total = 0
    for piece in _plain(file, incoming):
        total += len(piece)
        if total > most:
            raise ImageError(f"the snapshot unpacks to more than {most:,} bytes")


async def pieces(file: Path, incoming: ImageArchive) -> AsyncIterator[bytes]:
    """Yield the tar archive of a snapshot in pieces."""
    source = _plain(file, incoming)
    while (piece := await workers.run(workers.TRANSFER, next, source, None)) is not None:
        yield piece


def _plain(file: Path, incoming: ImageArchive) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(_GZIP)
    try:
        with file.open("rb") as content:
            content.seek(incoming.start)
            left = incoming.end - incoming.start
            while left and (block := content.read(min(left, _BLOCK))):
                left -= len(block)
                data = block
                while data:
                    if piece := unpacker.decompress(data, _BLOCK):
                        yield piece
                    data = unpacker.unconsumed_tail
            if not unpacker.eof:
                raise ImageError(f"'{file}' is damaged: its archive is incomplete")
    except zlib.error as error:
        raise ImageError(f"'{file}' is damaged: {error}") from error
    except OSError as error:
        raise ImageError(f"the snapshot '{file}' cannot be read: {error.strerror or error}") from error


def _understood(content: IO[bytes], file: Path) -> ImageArchive:
    found = read_snapshot_header(content, _FORMAT, _MAX_HEADER_BYTES)
    if found is None:
        raise ImageError(
            f"'{file}' is not a snapshot of a Docker engine",
            hint="Only the kind of engine that exported a snapshot can import it.",
        )
    header, start, end = found
    check_snapshot_version(file, header, _VERSION)
    check_snapshot_digest(content, file, end)
    try:
        return ImageArchive(SavedState.model_validate(header.get("saved")), start, end)
    except ValidationError as error:
        raise ImageError(f"'{file}' is not a snapshot: its header is invalid") from error
