"""The contract of a writable layer, and the plainest way to keep it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.errors import EngineError
from atoll.images import tree

_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class Layer:
    """A directory with `upper` and `work` in it, ready to be the writable part of an overlay."""

    layer_id: str
    path: Path


class Layers(Protocol):
    """All writable layers of one installation. Blocking, quick; may be used from many threads and processes at once."""

    @property
    def enforces_disk(self) -> bool:
        """Whether `disk_bytes` is a wall."""

    def create_layer(self, layer_id: str, disk_bytes: int | None) -> Layer:
        """A new, empty one. Raises EngineError if it exists, or when a limit is asked for that is not enforced here."""

    def delete_layer(self, layer_id: str) -> None:
        """With all that is in it. May be repeated."""

    def usage(self, layer_id: str) -> int | None:
        """Bytes in use; None if it is not known without looking at every file."""

    def is_full(self, layer_id: str) -> bool:
        """Whether its disk limit is reached. Reads a few lines of the kernel's: quicker than the hop to a thread."""

    def list(self) -> list[str]: ...

    def close(self) -> None:
        """Let go of what nobody uses. Layers stay. May be repeated."""


def checked(layer_id: str) -> str:
    if not _ID.fullmatch(layer_id):
        raise EngineError(f"{layer_id[:80]!r} cannot be the name of a layer")
    return layer_id


def names_in(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if _ID.fullmatch(name))
    except FileNotFoundError:
        return []


def make_parts(path: Path) -> None:
    (path / "upper").mkdir(mode=0o755)
    (path / "work").mkdir(mode=0o700)


@dataclass(frozen=True, slots=True)
class PlainLayers:
    """Directories. A disk limit cannot be kept, so it is refused."""

    directory: Path
    enforces_disk: bool = False

    def create_layer(self, layer_id: str, disk_bytes: int | None) -> Layer:
        if disk_bytes is not None:
            raise EngineError("a plain directory cannot keep a disk limit")
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path(layer_id)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            raise EngineError(f"there is already a layer '{layer_id}'") from None
        make_parts(path)
        return Layer(layer_id, path)

    def path(self, layer_id: str) -> Path:
        return self.directory / checked(layer_id)

    def delete_layer(self, layer_id: str) -> None:
        tree.remove(self.path(layer_id))

    def usage(self, layer_id: str) -> int | None:
        return None

    def is_full(self, layer_id: str) -> bool:
        return False

    def list(self) -> list[str]:
        return names_in(self.directory)

    def close(self) -> None:
        """Nothing is held."""
