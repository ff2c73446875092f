"""The interface for writable layers, and its simplest implementation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.archive import tree
from atoll.errors import EngineError, UnsupportedError

_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class Layer:
    """A directory with `upper` and `work` in it, for use as the writable part of an overlay mount."""

    layer_id: str
    path: Path


class Replacement(Protocol):
    def commit(self) -> None:
        """Replace the layer's content atomically. The former content is deleted."""

    def discard(self) -> None:
        """Delete the prepared content. May be repeated, and called after `commit`."""


class Layers(Protocol):
    """All writable layers of one installation.

    The methods block, but only briefly, and may be called from many threads and processes at once.
    """

    @property
    def enforces_disk(self) -> bool:
        """Whether `disk_bytes` is enforced."""

    @property
    def can_save(self) -> bool:
        """Whether states of layers can be saved, so that `save` and `origin` below work."""

    def create_layer(self, layer_id: str, disk_bytes: int | None, origin: str | None = None) -> Layer:
        """Create a layer, empty or with the content of the saved state `origin`, which does not count for the limit.

        The limit applies to the sum of the layer, its saved states as long as they are kept, and its replacements.
        Raises EngineError if the layer exists, or if a limit is requested but not enforced here.
        """

    def replace_layer(self, layer_id: str, disk_bytes: int | None, origin: str | None) -> Replacement:
        """Prepare other content for a layer. The layer must not be in use when the replacement is committed.

        Even if the account is full, the limit is raised to leave a little room for starting the sandbox, until `limit`
        is called.
        """

    def limit(self, layer_id: str, disk_bytes: int | None) -> None:
        """Set the limit for the sum of the layer and its saved states."""

    def open_layer(self, layer_id: str) -> Layer:
        """Open an existing layer that is not in use, to mount it again. Raises EngineError."""

    def save(self, layer_id: str, saved_id: str) -> None:
        """Save the current content of the layer atomically. The layer may be in use."""

    def copy_saved(self, saved_id: str, new_id: str) -> None: ...

    def make_saved(self, saved_id: str, fill: Callable[[Path], None]) -> None:
        """Create a saved state from an empty layer that `fill` fills. A failure leaves nothing behind."""

    def delete_saved(self, saved_id: str) -> None:
        """Delete a saved state. Layers made from it are not affected. May be repeated."""

    def list_saved(self) -> list[str]:
        """Return the ids of all saved states, also of those that `make_saved` has begun and not finished."""

    def looking(self, name: str, *, saved: bool) -> AbstractContextManager[Path]:
        """Provide the directory of a layer or a saved state for reading, while the context lasts."""

    def delete_layer(self, layer_id: str) -> None:
        """Delete a layer with everything in it. May be repeated."""

    def usage(self, layer_id: str) -> int | None:
        """Return how many bytes were written to this layer and are still used by it or its saved states. None if that
        cannot be determined without reading every file."""

    def account_usage(self, layer_id: str) -> int | None:
        """Return how many bytes count for the limit, including those of saved states. None if there is no limit."""

    def sweep(self) -> None:
        """Remove accounts of layers that are gone."""

    def is_full(self, layer_id: str) -> bool:
        """Return whether the disk limit is reached. This reads only a few lines from the kernel, which is faster than
        using another thread."""

    def list(self) -> list[str]: ...

    def close(self) -> None:
        """Release unused resources, such as the mount of an empty storage pool. Layers stay. May be repeated."""


def checked(layer_id: str) -> str:
    if not _ID.fullmatch(layer_id):
        raise EngineError(f"{layer_id[:80]!r} cannot be the name of a layer")
    return layer_id


def _cannot_save() -> UnsupportedError:
    return UnsupportedError(
        "a layer in a plain directory cannot be saved",
        hint="Checkpoints need btrfs: root, mkfs.btrfs (apt-get install btrfs-progs) and a loop device.",
    )


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
    """Layers that are plain directories. They cannot enforce a disk limit, so one is refused."""

    directory: Path
    enforces_disk: bool = False
    can_save: bool = False

    def create_layer(self, layer_id: str, disk_bytes: int | None, origin: str | None = None) -> Layer:
        if origin is not None:
            raise _cannot_save()
        if disk_bytes is not None:
            raise EngineError("a plain directory cannot enforce a disk limit")
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

    def replace_layer(self, layer_id: str, disk_bytes: int | None, origin: str | None) -> Replacement:
        raise _cannot_save()

    def open_layer(self, layer_id: str) -> Layer:
        path = self.directory / checked(layer_id)
        if not path.is_dir():
            raise EngineError(f"there is no layer '{layer_id}'")
        return Layer(layer_id, path)

    def save(self, layer_id: str, saved_id: str) -> None:
        raise _cannot_save()

    def copy_saved(self, saved_id: str, new_id: str) -> None:
        raise _cannot_save()

    def make_saved(self, saved_id: str, fill: Callable[[Path], None]) -> None:
        raise _cannot_save()

    def delete_saved(self, saved_id: str) -> None:
        """Do nothing, because there are no saved states."""

    def list_saved(self) -> list[str]:
        return []

    def looking(self, name: str, *, saved: bool) -> AbstractContextManager[Path]:
        if saved:
            raise _cannot_save()
        return nullcontext(self.open_layer(name).path)

    def limit(self, layer_id: str, disk_bytes: int | None) -> None:
        if disk_bytes is not None:
            raise EngineError("a plain directory cannot enforce a disk limit")

    def usage(self, layer_id: str) -> int | None:
        return None

    def account_usage(self, layer_id: str) -> int | None:
        return None

    def sweep(self) -> None:
        """Do nothing, because there are no accounts."""

    def is_full(self, layer_id: str) -> bool:
        return False

    def list(self) -> list[str]:
        return names_in(self.directory)

    def close(self) -> None:
        """Do nothing, because no resources are held."""
