"""How much an image may be. Every number is a cap on what a hostile archive can make us do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.errors import ImageError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ImageLimits:
    total_bytes: int = 32 * GIB
    """Of all layers together, unpacked; files that a later layer deletes count too."""
    file_bytes: int = 16 * GIB
    entries: int = 2_000_000
    depth: int = 128
    path_bytes: int = 4095
    ratio: int = 100
    """Unpacked bytes for each packed byte. Root file systems have 2 to 5, logs 20, a bomb 1000."""
    ratio_free_bytes: int = 64 * MIB
    """So much is unpacked before the ratio is looked at: small archives of zeros are no danger."""
    download_bytes: int = 16 * GIB
    document_bytes: int = 4 * MIB
    """Of one manifest, index or configuration."""
    layers: int = 256
    pax_bytes: int = 1 * MIB
    timeout_s: float = 3600.0


@dataclass(slots=True)
class Budget:
    """What is left of the limits of one image. All its layers spend from the same one."""

    limits: ImageLimits = field(default_factory=ImageLimits)
    bytes_used: int = 0
    entries_used: int = 0
    entry_bytes: int = 0
    """What each entry costs besides its content. Of an image that is nobody's quota; of a snapshot it is."""
    room: Callable[[int], None] | None = None
    """Called with the bytes that really take room on the disk, without holes. May raise."""

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
