"""The directories of layers in the image store, and how they lie upon each other.

    images/roots/<digest>/rootfs     the files of one layer; a complete root file system if nothing is below it
    images/roots/<digest>/meta.json  its digest, its own size and number of entries, and `below`, the digest under it

The digest of a layer covers everything below it, so a digest names a whole stack. Earlier versions wrote no `below`:
their images have one layer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.archive import tree
from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError, SpecError

MAX_LAYERS = 12
"""The greatest depth of a stack. Each layer is one more mount of every sandbox and one more directory in every lookup,
and old kernels take the names of all layers in one string of 256 bytes."""
_MOST_ON_DISK = 64
"""A chain that is longer than this is damaged."""
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}\Z")
_META = "meta.json"


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One layer of an image."""

    digest: str
    """The digest of the stack that ends with this layer."""
    root: Path
    size_bytes: int
    """The size of this layer alone."""


@dataclass(frozen=True, slots=True)
class LayerRoots:
    directory: Path

    def path(self, digest: str) -> Path:
        if not _DIGEST.match(digest):
            raise SpecError(f"{digest[:80]!r} is not the digest of an image")
        return self.directory / digest.removeprefix("sha256:")

    def rootfs(self, digest: str) -> Path:
        return self.path(digest) / "rootfs"

    def stack(self, digest: str) -> tuple[str, ...]:
        """Return the digests of the layers, topmost first. Raises ImageNotFoundError if one of them is missing."""
        found = [digest]
        while below := self._below(found[-1]):
            found.append(below)
            if len(found) > _MOST_ON_DISK:
                raise ImageError(f"the image {digest} has layers without end", hint="Remove it and get it again.")
        return tuple(found)

    def layers(self, digest: str) -> tuple[Path, ...]:
        return tuple(self.rootfs(each) for each in self.stack(digest))

    def infos(self, digest: str) -> tuple[LayerInfo, ...]:
        return tuple(LayerInfo(each, self.rootfs(each), self.own_bytes(each)) for each in self.stack(digest))

    def own_bytes(self, digest: str) -> int:
        """Return the size of a layer alone, or 0 if its description cannot be read."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(self._meta(digest)["size_bytes"])
        return 0

    def total_bytes(self, digest: str) -> int:
        return sum(self.own_bytes(each) for each in self.stack(digest))

    def with_all_below(self, digests: Iterable[str]) -> set[str]:
        """Return these digests, as far as they exist, and those of all layers under them.

        Raises ImageError if it cannot be read what lies under one, because the rest would then be taken for unused.
        """
        found: set[str] = set()
        for digest in digests:
            current = digest
            while current and current not in found and self.path(current).is_dir():
                found.add(current)
                current = self._below(current)
        return found

    def all(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [digest for name in os.listdir(self.directory) if _DIGEST.match(digest := f"sha256:{name}")]
        return []

    def measured(self, root: Path, below: str, work: Work) -> tree.Measure:
        """Measure a root directory that lies on the layer `below`, or on nothing. Its digest covers what is below."""
        own = tree.measure(root, work, layer=bool(below))
        if not below:
            return own
        info = os.stat(root, follow_symlinks=False)
        top = f"{stat.S_IMODE(info.st_mode):o} {info.st_uid} {info.st_gid}"
        digest = hashlib.sha256(f"atoll-stack-1\n{below}\n{own.digest}\n{top}\n".encode()).hexdigest()
        return tree.Measure(f"sha256:{digest}", own.size_bytes, own.entries)

    @staticmethod
    def description(measured: tree.Measure, below: str) -> tuple[str, str]:
        """Return the name and the content of the file that describes a layer."""
        values = {"digest": measured.digest, "size_bytes": measured.size_bytes, "entries": measured.entries}
        return _META, json.dumps(values | ({"below": below} if below else {}), indent=1)

    def _below(self, digest: str) -> str:
        try:
            below = self._meta(digest).get("below", "")
        except FileNotFoundError:
            if self.rootfs(digest).is_dir():
                return ""
            raise ImageNotFoundError(
                f"there is no image {digest} on this machine", hint="Pull, build or import it again."
            ) from None
        except (OSError, ValueError, AttributeError) as error:
            raise ImageError(f"the image {digest} is damaged", hint="Remove it and get it again.") from error
        if not isinstance(below, str) or (below and not _DIGEST.match(below)):
            raise ImageError(f"the image {digest} is damaged", hint="Remove it and get it again.")
        return below

    def _meta(self, digest: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path(digest) / _META).read_bytes())
        return found
