"""Puts the layers of an image on top of each other, into one directory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from atoll.archive.archive_limits import Budget, ImageLimits
from atoll.archive.decompress import Reader, plain
from atoll.archive.extract import Extraction, extract
from atoll.archive.root import Root
from atoll.archive.work import Work
from atoll.errors import ImageError


@dataclass(frozen=True, slots=True)
class Layer:
    open: Callable[[], BinaryIO]
    diff_id: str = ""
    """The digest of the unpacked stream; empty when nobody knows it."""


class _HashingReader:
    def __init__(self, inner: Reader) -> None:
        self._inner = inner
        self._hash = hashlib.sha256()

    def read(self, size: int, /) -> bytes:
        chunk = self._inner.read(size)
        self._hash.update(chunk)
        return chunk

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def flatten(
    layers: Sequence[Layer],
    rootfs: Path,
    limits: ImageLimits,
    work: Work,
    room: Callable[[int], None] | None = None,
) -> Extraction:
    """Unpack the layers, lowest first. Raises ImageError; what is in the directory then is of no use. `room` is called
    with the size of each piece that is written, and may raise."""
    budget = Budget(limits, room=room)
    total = Extraction()
    with Root(rootfs) as root:
        for number, layer in enumerate(layers, 1):
            detail = f"layer {number} of {len(layers)}"
            work.report("extract", detail, budget.bytes_used)
            with layer.open() as file, plain(file, limits, work) as stream:
                hashing = _HashingReader(stream) if layer.diff_id else None
                result = extract(hashing or stream, root, budget, work, require_end=hashing is None, detail=detail)
                if hashing is not None and hashing.digest != layer.diff_id:
                    raise ImageError(
                        f"{detail} is not what the image's configuration says", hint="Get the image again."
                    )
            total.devices_skipped += result.devices_skipped
            total.set_ids_stripped += result.set_ids_stripped
            for note in result.notes:
                total.note(note)
    return total
