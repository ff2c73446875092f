"""The contract of a writable layer, and the plainest way to keep it."""

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
    """A directory with `upper` and `work` in it, ready to be the writable part of an overlay."""

    layer_id: str
    path: Path


class Replacement(Protocol):
    def commit(self) -> None:
        """It takes the layer's place at once; what was there is gone."""

    def discard(self) -> None:
        """It is not wanted any more. May be repeated, and after `commit`."""


class Layers(Protocol):
    """All writable layers of one installation. Blocking, quick; may be used from many threads and processes at once."""

    @property
    def enforces_disk(self) -> bool:
        """Whether `disk_bytes` is a wall."""

    @property
    def can_save(self) -> bool:
        """Whether the states of layers can be kept: `save`, and `origin` below."""

    def create_layer(self, layer_id: str, disk_bytes: int | None, origin: str | None = None) -> Layer:
        """A new one, empty or with what was saved as `origin`. What comes from there counts as nothing.

        The limit is one for the layer, for what is saved of it as long as that is kept, and for whatever replaces it.
        Raises EngineError if it exists, or when a limit is asked for that is not enforced here.
        """

    def replace_layer(self, layer_id: str, disk_bytes: int | None, origin: str | None) -> Replacement:
        """Prepare another content for a layer; nobody may use it any more when that takes its place. There is a little
        room in it however full the account is, until `limit` says otherwise: it has to be started."""

    def limit(self, layer_id: str, disk_bytes: int | None) -> None:
        """What the layer and all that is kept of it may take from now on."""

    def open_layer(self, layer_id: str) -> Layer:
        """One that exists, and that nobody uses, to be mounted once more. Raises EngineError."""

    def save(self, layer_id: str, saved_id: str) -> None:
        """Keep what is in the layer now, at one moment, while it is in use."""

    def copy_saved(self, saved_id: str, new_id: str) -> None: ...

    def make_saved(self, saved_id: str, fill: Callable[[Path], None]) -> None:
        """Keep what `fill` puts into an empty layer, all or nothing."""

    def delete_saved(self, saved_id: str) -> None:
        """May be repeated. Others that come from it are not affected."""

    def list_saved(self) -> list[str]: ...

    def looking(self, name: str, *, saved: bool) -> AbstractContextManager[Path]:
        """The directory of a layer or of something saved, for reading, as long as the context lasts."""

    def delete_layer(self, layer_id: str) -> None:
        """With all that is in it. May be repeated."""

    def usage(self, layer_id: str) -> int | None:
        """Bytes that were written to this layer and are still in use, by it or by what is saved of it; None if it is
        not known without looking at every file."""

    def account_usage(self, layer_id: str) -> int | None:
        """Bytes that count against its limit, also those that only saved states hold. None if it has no limit."""

    def sweep(self) -> None:
        """Remove accounts of layers that are gone."""

    def is_full(self, layer_id: str) -> bool:
        """Whether its disk limit is reached. Reads a few lines of the kernel's: quicker than the hop to a thread."""

    def list(self) -> list[str]: ...

    def close(self) -> None:
        """Let go of what nobody uses. Layers stay. May be repeated."""


def checked(layer_id: str) -> str:
    if not _ID.fullmatch(layer_id):
        raise EngineError(f"{layer_id[:80]!r} cannot be the name of a layer")
    return layer_id


def _cannot_save() -> UnsupportedError:
    return UnsupportedError(
        "a plain directory cannot keep its states",
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
    """Directories. A disk limit cannot be kept, so it is refused."""

    directory: Path
    enforces_disk: bool = False
    can_save: bool = False

    def create_layer(self, layer_id: str, disk_bytes: int | None, origin: str | None = None) -> Layer:
        if origin is not None:
            raise _cannot_save()
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
        """There is none."""

    def list_saved(self) -> list[str]:
        return []

    def looking(self, name: str, *, saved: bool) -> AbstractContextManager[Path]:
        if saved:
            raise _cannot_save()
        return nullcontext(self.open_layer(name).path)

    def limit(self, layer_id: str, disk_bytes: int | None) -> None:
        if disk_bytes is not None:
            raise EngineError("a plain directory cannot keep a disk limit")

    def usage(self, layer_id: str) -> int | None:
        return None

    def account_usage(self, layer_id: str) -> int | None:
        return None

    def sweep(self) -> None:
        """There is nothing to remove."""

    def is_full(self, layer_id: str) -> bool:
        return False

    def list(self) -> list[str]:
        return names_in(self.directory)

    def close(self) -> None:
        """Nothing is held."""
