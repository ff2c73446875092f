"""What an image is: a stack of read-only layers, and what is known about it. Also its record, as it is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.images.oci_documents import ImageConfig
from atoll.images.reference import Kind

_NOT_WRITTEN = ("layers",)


@dataclass(frozen=True, slots=True)
class Image:
    """A root file system to start from. It has no layers if it is `host`, whose view the engine makes."""

    reference: str
    kind: Kind
    digest: str = ""
    layers: tuple[Path, ...] = ()
    """The root directories of its layers, topmost first. All but the lowest are in the format of an overlay: a removed
    name is a character device 0/0, and a directory that hides the one below is marked opaque."""
    config: ImageConfig = field(default_factory=ImageConfig)
    size_bytes: int = 0
    """The size of all layers together. Images share their lower layers."""
    created_at: float = 0.0
    source: str = ""
    """The version of the source, to detect changes: a manifest's or recipe's digest, or a file's inode and times."""
    notes: tuple[str, ...] = ()
    """Messages about parts that were left out when it was unpacked, such as device nodes."""
    private: bool = False
    """Whether it was pulled with a login. Other users may use it only if the registry lets them pull it, too."""
    owner: str = ""
    """Whose image this is. Empty: it belongs to everybody on this machine. Names of different owners do not collide."""

    def with_notes(self, notes: tuple[str, ...]) -> Image:
        return replace(self, notes=notes)

    @property
    def root(self) -> Path | None:
        """The root directory of the topmost layer."""
        return self.layers[0] if self.layers else None


HOST = Image("host", Kind.HOST)


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of `gc`: what it removed."""

    digests: tuple[str, ...] = ()
    size_bytes: int = 0
    leftovers: int = 0


@dataclass(frozen=True, slots=True)
class Pushed:
    """What was pushed."""

    reference: str
    digest: str
    """The digest of the manifest: the image can be pulled as `NAME@DIGEST`."""
    sent_bytes: int
    """The size of the layers and documents that the registry did not have."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An image that is being made. Its directories are removed at the end, except for a committed `rootfs`."""

    rootfs: Path
    scratch: Path


def record_of(image: Image, stack: tuple[str, ...]) -> dict[str, Any]:
    """Return what is written down about an image. `stack` are the digests of its layers, topmost first."""
    record = {name: value for name, value in asdict(image).items() if name not in _NOT_WRITTEN}
    return record | ({"stack": stack} if len(stack) > 1 else {})


def image_of(record: dict[str, Any], root_of: Callable[[str], Path]) -> Image:
    """Return the image of a record. Raises KeyError, TypeError or ValueError for an invalid one."""
    value = dict(record)
    config: dict[str, Any] = {
        key: tuple(item) if isinstance(item, list) else item for key, item in value.pop("config").items()
    }
    value["notes"] = tuple(value["notes"])
    value["kind"] = Kind(value["kind"])
    stack = value.pop("stack", (value["digest"],))
    return Image(**value, config=ImageConfig(**config), layers=tuple(root_of(digest) for digest in stack))
