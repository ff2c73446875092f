"""Making the image of a reference (pull, build or import) unless the store has it and it is up to date."""

from __future__ import annotations

import os

from atoll.archive.archive_limits import ImageLimits
from atoll.archive.extract import Extraction
from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError
from atoll.images.access import Access
from atoll.images.debian import build
from atoll.images.blobs import Blobs
from atoll.images.flatten import flatten
from atoll.images.image_store import Draft, Image, Store
from atoll.images.mirrors import Mirror
from atoll.images.oci_documents import ImageConfig
from atoll.images.pull import Registry
from atoll.images.recipes import Recipe, Recipes, suite_recipe
from atoll.images.reference import Kind, Reference
from atoll.images.registry_client import RegistryClient
from atoll.images.tar_import import import_from_docker, import_stream


class ImageMaker:
    """Makes images. Its methods block. An image is stored only when it is complete."""

    def __init__(
        self,
        store: Store,
        recipes: Recipes,
        limits: ImageLimits,
        access: Access,
        *,
        blobs: Blobs,
        plain_http: frozenset[str] = frozenset(),
        mirrors: tuple[Mirror, ...] = (),
    ) -> None:
        self._store, self._recipes, self._limits, self._plain_http = store, recipes, limits, plain_http
        self._access, self._blobs, self._mirrors = access, blobs, mirrors

    def present(self, reference: Reference, source: Reference) -> Image | None:
        """Return the stored image if it is up to date, as far as can be determined without the network."""
        return self._current(str(reference), self._stamp(source))

    def make(self, reference: Reference, source: Reference, work: Work, *, refresh: bool) -> Image:
        name = str(reference)
        stamp = self._stamp(source)
        if not refresh and (image := self._current(name, stamp)) is not None:
            return image
        with self._store.making(name, work):
            if not refresh and (image := self._current(name, stamp)) is not None:
                return image
            with self._store.draft(work) as draft:
                if source.kind is Kind.OCI:
                    return self._pull(source, name, draft, work)
                config, result = self._fill(source, draft, work)
                made = Image(name, reference.kind, config=config, source=stamp, notes=tuple(result.notes))
                return self._store.commit(draft, made, work)

    def _pull(self, source: Reference, name: str, draft: Draft, work: Work) -> Image:
        """Pull an image from the first of its places that has it: its mirrors, then its registry."""
        places = [*(mirror for mirror in self._mirrors if mirror.registry == source.registry), None]
        for number, mirror in enumerate(places):
            client = RegistryClient(
                source, self._limits, work, plain_http_registries=self._plain_http, access=self._access, mirror=mirror
            )
            registry = Registry(client, self._blobs)
            scratch = draft.scratch / str(number)
            scratch.mkdir()
            try:
                resolved = registry.resolve()
                image = self._store.find(name)
                if image is not None and image.source == resolved.digest:
                    if image.private and not registry.used_login:
                        self._store.publish(name, work)
                    return image
                config, layers = registry.download(resolved, scratch)
                break
            except ImageError as error:
                work.check()
                if mirror is None:
                    raise
                work.report("pull", f"the mirror {mirror.host} does not help: {error.reason}")
        result = flatten(layers, draft.rootfs, self._limits, work)
        private = registry.used_login
        made = Image(name, Kind.OCI, config=config, source=resolved.digest, notes=tuple(result.notes), private=private)
        return self._store.commit(draft, made, work)

    def _fill(self, source: Reference, draft: Draft, work: Work) -> tuple[ImageConfig, Extraction]:
        if source.kind is Kind.DOCKER:
            return import_from_docker(source, draft, self._limits, work)
        if source.kind is Kind.TAR:
            with open(source.name, "rb", buffering=0, opener=_open_regular) as file:
                return import_stream(file, draft, self._limits, work)
        recipe = self._recipe(source)
        return ImageConfig(), build(recipe, draft, self._limits, work)

    def _recipe(self, reference: Reference) -> Recipe:
        return suite_recipe(reference.name) if reference.kind is Kind.DEBIAN else self._recipes.get(reference.name)

    def _current(self, name: str, stamp: str) -> Image | None:
        image = self._store.find(name)
        if image is not None and image.private and self._access.guarded:
            return None  # only the registry knows whether this user may have a private image
        return image if image is not None and (not stamp or image.source == stamp) else None

    def _stamp(self, source: Reference) -> str:
        """Return the current version of a source, to detect outdated images, or "" if only a registry or a Docker
        engine knows it."""
        if source.kind in (Kind.DEBIAN, Kind.RECIPE):
            return self._recipe(source).digest
        if source.kind is Kind.TAR:
            try:
                info = os.stat(source.name)
            except OSError as error:
                raise ImageNotFoundError(f"the archive {source.name!r} cannot be read: {error.strerror}") from error
            return f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}"
        return ""


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file. O_NONBLOCK avoids waiting for a writer if the path is a pipe."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not os.path.isfile(f"/proc/self/fd/{fd}"):
        os.close(fd)
        raise ImageError(f"{path!r} is not a file")
    return fd
