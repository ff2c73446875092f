"""Limits for images. Each bounds the work that an untrusted archive can cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.errors import ImageError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ImageLimits:
    total_bytes: int = 32 * GIB
    """The unpacked size of all layers together, including files that a later layer deletes."""
    file_bytes: int = 16 * GIB
    entries: int = 2_000_000
    depth: int = 128
    path_bytes: int = 4095
    ratio: int = 100
    """Unpacked bytes for each packed byte. Root file systems have 2 to 5, logs 20, decompression bombs 1000."""
    ratio_free_bytes: int = 64 * MIB
    """How many bytes are unpacked before the ratio is checked, because small archives of zeros are harmless."""
    download_bytes: int = 16 * GIB
    document_bytes: int = 4 * MIB
    """The size of one manifest, index or configuration."""
    layers: int = 256
    pax_bytes: int = 1 * MIB
    timeout_s: float = 3600.0
    stall_s: float = 30.0
    """How long a registry may send or accept nothing before the connection is given up."""


@dataclass(slots=True)
class Budget:
    """How much of the limits of one image has been used. All of its layers share one budget."""

    limits: ImageLimits = field(default_factory=ImageLimits)
    bytes_used: int = 0
    entries_used: int = 0
    entry_bytes: int = 0
    """Bytes that each entry counts besides its content: 0 for images; for snapshots the metadata counts, too, because
    they have a quota."""
    room: Callable[[int], None] | None = None
    """Called with the number of bytes that each piece uses on disk, without holes. May raise."""

    def spend_bytes(self, count: int) -> None:
        self.bytes_used += count
        if self.bytes_used > self.limits.total_bytes:
            raise ImageError(
                f"the image unpacks to more than {self.limits.total_bytes:,} bytes",
                hint="Raise the limit total_bytes if you trust this image.",
            )

    def spend_room(self, count: int) -> None:
        if self.room is not None:
            self.room(count)

    def spend_entry(self) -> None:
        self.entries_used += 1
        if self.entry_bytes:
            self.spend_bytes(self.entry_bytes)
        if self.entries_used > self.limits.entries:
            raise ImageError(
                f"the image has more than {self.limits.entries:,} entries",
                hint="Raise the limit entries if you trust this image.",
            )
