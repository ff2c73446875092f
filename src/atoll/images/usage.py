"""What images take: alone, shared with others, and of whose share. And removing those that nobody uses."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from atoll.archive.work import Work
from atoll.errors import ImageError
from atoll.images.blobs import Blobs
from atoll.images.image import Image
from atoll.images.image_store import Store
from atoll.images.layer_roots import LayerInfo

_ENTRY_BYTES = 512
"""What a file, directory or link counts besides its content, because millions of empty files take room as well."""


@dataclass(frozen=True, slots=True)
class ImageUsage:
    """What an image takes, and who uses it."""

    image: Image
    own_bytes: int
    """The size of its layers that no other image has: about what its removal frees."""
    shared_bytes: int
    """The size of its layers that other images have, too."""
    users: tuple[str, ...]
    """The sandboxes and saved states that use it, which prevent its removal."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` removed."""

    references: tuple[str, ...]
    """The names of images."""
    image_bytes: int
    """The size of the layers that were removed."""
    blob_bytes: int
    """The size of transferred layers that had been kept for later pulls."""

    @property
    def freed_bytes(self) -> int:
        return self.image_bytes + self.blob_bytes


def usage(store: Store) -> list[ImageUsage]:
    """Return the images with what they take, in the order of their names."""
    images = store.ls()
    users: dict[str, list[str]] = {}
    for user, digest in store.leases().items():
        users.setdefault(digest, []).append(user)
    # Images of one digest are the same files under several names, so they share everything.
    layers = {image.digest: {each.digest: each.size_bytes for each in _infos(store, image.digest)} for image in images}
    count = Counter(layer for image in images for layer in layers[image.digest])
    found = []
    for image in images:
        sizes = layers[image.digest]
        own = sum(size for layer, size in sizes.items() if count[layer] == 1)
        found.append(ImageUsage(image, own, sum(sizes.values()) - own, tuple(sorted(users.get(image.digest, ())))))
    return found


def charged_bytes(store: Store, images: Iterable[Image]) -> int:
    """Return what these images take of their owner's share: each layer once, except those of images of everybody."""
    free = {layer.digest for image in store.ls() if not image.owner for layer in _infos(store, image.digest)}
    charged = {layer.digest: layer for image in images for layer in _infos(store, image.digest)}
    return sum(
        layer.size_bytes + _ENTRY_BYTES * _entries(layer.root.parent)
        for digest, layer in charged.items()
        if digest not in free
    )


def prune(
    store: Store,
    blobs: Blobs,
    work: Work,
    *,
    chosen: Callable[[Image], bool] | None = None,
    unused_s: float = 0.0,
    shared_things: bool = True,
) -> Pruned:
    """Remove what nobody uses. `chosen` says which images with a name are removed, if nothing uses them and they were
    made at least `unused_s` seconds ago. With `shared_things`, images without a name are removed as well, and
    transferred layers that have not been used for that time. What is in use stays.
    """
    before = _stored(store)
    removed = []
    if chosen is not None:
        used = set(store.leases().values())
        for image in store.ls():
            if chosen(image) and image.digest not in used and image.created_at <= time.time() - unused_s:
                work.check()
                with contextlib.suppress(ImageError):  # a sandbox has begun to use it, or somebody else removed it
                    store.remove(image.reference, work, image.owner)
                    removed.append(image.reference)
    blob_bytes = 0
    if shared_things:
        store.gc(work)
        blob_bytes = blobs.sweep(0, unused_s=unused_s)
    after = _stored(store)
    freed = sum(size for digest, size in before.items() if digest not in after)
    return Pruned(tuple(removed), freed, blob_bytes)


def _stored(store: Store) -> dict[str, int]:
    """Return the size of each layer that is on the disk."""
    return {digest: _own_bytes(store, digest) for digest in store.layer_digests()}


def _own_bytes(store: Store, digest: str) -> int:
    infos = _infos(store, digest)
    return infos[0].size_bytes if infos else 0


def _infos(store: Store, digest: str) -> tuple[LayerInfo, ...]:
    """Return the layers of an image, or none if it was removed or is damaged."""
    try:
        return store.layer_infos(digest)
    except ImageError:
        return ()


def _entries(directory: Path) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((directory / "meta.json").read_bytes())["entries"])
    return 0
