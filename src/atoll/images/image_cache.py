"""A cache of finished images outside the data directory, so that another data directory of this machine need not make
them again.

    layers/<digest>/rootfs   the files of one layer, as in an image store
    images/<hash>.json       the record of one image: its version, its layers and its configuration
    tmp/                     layers that are being copied

Files of layers never change, so on one file system they are shared by hard links and use no more space. Whatever is
taken out is measured, and is used only if it has the digest that it should have. The cache keeps one version of each
image. It needs root, as images of several layers do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll import durable
from atoll.archive import tree
from atoll.archive.work import Work
from atoll.errors import ImageError
from atoll.images.image import Image, image_of, record_of
from atoll.images.image_store import Store
from atoll.images.locks import locked

VARIABLE = "ATOLL_IMAGE_CACHE"
_OFF = "off"
_PRIVATE = 0o700


class ImageCache:
    """All methods block."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._layers, self._images, self._tmp = directory / "layers", directory / "images", directory / "tmp"

    @classmethod
    def of_user(cls, environ: Mapping[str, str] | None = None) -> ImageCache | None:
        """Return the cache that ATOLL_IMAGE_CACHE names, by default the one in the user's cache directory. None if the
        variable is `off`, and for users other than root."""
        environ = os.environ if environ is None else environ
        named = environ.get(VARIABLE, "")
        if named == _OFF or os.geteuid() != 0:
            return None
        home = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME') or Path.home()}/.cache"
        return cls(Path(named or f"{home}/atoll/images").absolute())

    def keep(self, store: Store, image: Image, work: Work) -> None:
        """Put an image into the cache, in place of an older version of it."""
        with self._alone(work):
            for layer in store.layer_infos(image.digest):
                target = self._layer(layer.digest)
                if not target.exists():
                    with self._draft() as draft:
                        _copy(layer.root.parent, draft, work)
                        draft.rename(target)
            stack = tuple(layer.digest for layer in store.layer_infos(image.digest))
            durable.write(self._record(image.reference), json.dumps(record_of(image, stack), indent=1), sync=True)
            self._drop_unused()

    def load(self, store: Store, reference: str, source: str, work: Work) -> Image | None:
        """Put an image of this version from the cache into a store. None if it is not there, or is damaged."""
        with self._alone(work), contextlib.suppress(OSError, KeyError, TypeError, ValueError, ImageError):
            record = json.loads(self._record(reference).read_bytes())
            image = image_of(record, lambda digest: self._layer(digest) / "rootfs")
            if image.reference != reference or image.source != source:
                return None
            below = ""
            for layer in reversed(image.layers):
                digest = f"sha256:{layer.parent.name}"
                self._add(store, digest, below, work)
                below = digest
            return store.name(replace(image, layers=()), image.digest, work)
        return None

    def _add(self, store: Store, digest: str, below: str, work: Work) -> None:
        """Put one layer into the store. Raises ImageError if it has other content than it should."""
        if store.root(digest).is_dir():
            return
        with store.draft(work) as draft:
            work.report("extract", digest[:19])
            _copy(self._layer(digest) / "rootfs", draft.rootfs, work)
            found = store.add_layer(draft, work, below=below)
        if found != digest:
            tree.remove(self._layer(digest))
            raise ImageError(f"the layer {digest} in '{self._directory}' is damaged")

    @contextlib.contextmanager
    def _alone(self, work: Work) -> Iterator[None]:
        for path in (self._directory, self._layers, self._images, self._tmp):
            path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        with locked(self._directory / "lock", work, "another process uses the cache of images"):
            for path in self._tmp.iterdir():
                tree.remove(path)  # whoever made it has died, or it would have the lock
            yield

    @contextlib.contextmanager
    def _draft(self) -> Iterator[Path]:
        path = self._tmp / secrets.token_hex(8)
        path.mkdir(mode=_PRIVATE)
        try:
            yield path
        finally:
            if path.exists():
                tree.remove(path)

    def _drop_unused(self) -> None:
        kept: set[str] = set()
        for path in self._images.glob("*.json"):
            record: dict[str, Any] = json.loads(path.read_bytes())
            kept |= {str(digest).removeprefix("sha256:") for digest in record.get("stack", (record["digest"],))}
        for path in self._layers.iterdir():
            if path.name not in kept:
                tree.remove(path)

    def _layer(self, digest: str) -> Path:
        return self._layers / digest.removeprefix("sha256:")

    def _record(self, reference: str) -> Path:
        return self._images / f"{hashlib.sha256(reference.encode()).hexdigest()[:40]}.json"


def _copy(source: Path, target: Path, work: Work) -> None:
    """Copy the content of a directory, with owners, modes, times and extended attributes. Files are linked if both are
    on one file system. Raises ImageError."""
    program = shutil.which("cp")
    if program is None:
        raise ImageError("cp is not installed", hint="apt-get install coreutils")
    how = "--link" if source.stat().st_dev == target.stat().st_dev else "--reflink=auto"
    argv = [program, "--archive", how, "--", f"{source}/.", str(target)]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        with work.on_cancel(process.kill):
            _, said = process.communicate()
        work.check()
    if process.returncode:
        reason = said.decode(errors="replace").strip().splitlines()
        raise ImageError(f"a layer could not be copied: {reason[-1][:300] if reason else 'no reason was given'}")
