"""Making the image of a reference (pull, build or import) unless the store has it and it is up to date."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from atoll.archive.archive_limits import ImageLimits
from atoll.archive.extract import Extraction
from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError, SpecError
from atoll.images.access import Access
from atoll.images.allowance import Allowance, Room
from atoll.images.blobs import Blobs
from atoll.images.debian import build
from atoll.images.flatten import flatten
from atoll.images.image import Draft, Image
from atoll.images.image_store import Store
from atoll.images.mirrors import Mirror
from atoll.images.oci_documents import ImageConfig
from atoll.images.pull import Registry, Resolved
from atoll.images.recipes import Recipe, Recipes, suite_recipe
from atoll.images.reference import Kind, Reference, parse_name
from atoll.images.registry_client import RegistryClient
from atoll.images.tar_import import import_from_docker, import_stream, load_stream


class ImageMaker:
    """Makes images for one access. Its methods block. An image is stored only when it is complete."""

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
        self._allowance = Allowance(store, access)

    def present(self, reference: Reference, source: Reference) -> Image | None:
        """Return the stored image if it is up to date, as far as can be determined without the network."""
        return self._current(reference, self._stamp(source))

    def make(self, reference: Reference, source: Reference, work: Work, *, refresh: bool) -> Image:
        name = str(reference)
        stamp = self._stamp(source)
        if not refresh and (image := self._current(reference, stamp)) is not None:
            return image
        owner = self._owner(reference)
        with self._store.making(_key(name, owner), work):
            if not refresh and (image := self._current(reference, stamp)) is not None:
                return image
            with self._store.draft(work) as draft:
                if source.kind is Kind.OCI:
                    return self._pull(source, name, draft, work)
                room = self._allowance.room(name) if owner else None
                config, result = self._fill(source, draft, room, work)
                notes = tuple(result.notes)
                made = Image(name, reference.kind, config=config, source=stamp, notes=notes, owner=owner)
                return self._commit(draft, made, work)

    def load(self, path: Path, name: str, work: Work) -> Image:
        """Store the image of an archive, under the name that it has there unless there is another one."""
        with self._store.draft(work) as draft:
            room = self._allowance.room(str(parse_name(name)) if name else "")
            with open(path, "rb", buffering=0, opener=_open_regular) as file:
                found, config, result = load_stream(file, draft, self._limits, work, self._room(room))
            try:
                reference = parse_name(name or found)
            except SpecError as error:
                if name or not found:
                    hint = None if name else "The archive does not name its image: give it a name with --name."
                    raise SpecError(error.reason, hint=hint or error.hint) from error
                raise ImageError(
                    f"the archive names its image {found[:80]!r}", hint="Choose a name: --name."
                ) from error
            owner = self._access.owner
            with self._store.making(_key(str(reference), owner), work):
                made = Image(str(reference), Kind.OCI, config=config, notes=tuple(result.notes), owner=owner)
                return self._commit(draft, made, work)

    def _pull(self, source: Reference, name: str, draft: Draft, work: Work) -> Image:
        """Pull an image from the first of its places that has it: its mirrors, then its registry."""
        room = self._allowance.room(name)
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
                present = self._present(source, name, resolved, registry.used_login, room, work)
                if present is not None:
                    return present
                self._allowance.refuse(resolved.download_bytes, room)
                config, layers = registry.download(resolved, scratch)
                break
            except ImageError as error:
                work.check()
                if mirror is None:
                    raise
                work.report("pull", f"the mirror {mirror.host} does not help: {error.reason}")
        result = flatten(layers, draft.rootfs, self._limits, work, self._room(room))
        made = Image(name, Kind.OCI, config=config, source=resolved.digest, notes=tuple(result.notes))
        made = dataclasses.replace(made, private=registry.used_login, owner=self._access.owner)
        return self._commit(draft, made, work)

    def _present(
        self, source: Reference, name: str, resolved: Resolved, used_login: bool, room: int | None, work: Work
    ) -> Image | None:
        """Return the image that the registry has just resolved, if its files are here.

        The files may have been pulled for somebody else, from the same repository. That the repository gave this access
        the manifest shows that it may have them.
        """
        image = self._find(name, self._access.owner)
        if image is not None and image.source == resolved.digest:
            if image.private and not used_login:
                self._store.publish(name, work, image.owner)
            return image
        repository = f"{source.registry}/{source.name}"
        for other in self._store.ls():
            same = other.reference.startswith((f"{repository}:", f"{repository}@")) and other.kind is Kind.OCI
            if same and other.source == resolved.digest:
                before = self._store.find(name, self._access.owner)
                self._allowance.refuse(other.size_bytes, room)
                named = dataclasses.replace(other, reference=name, owner=self._access.owner, private=used_login)
                made = self._store.name(named, other.digest, work)
                return self._allowance.keep_within(made, before, work)
        return None

    def _commit(self, draft: Draft, made: Image, work: Work) -> Image:
        before = self._store.find(made.reference, made.owner)
        return self._allowance.keep_within(self._store.commit(draft, made, work), before, work)

    def _fill(self, source: Reference, draft: Draft, room: int | None, work: Work) -> tuple[ImageConfig, Extraction]:
        if source.kind is Kind.DOCKER:
            return import_from_docker(source, draft, self._limits, work, self._room(room))
        if source.kind is Kind.TAR:
            with open(source.name, "rb", buffering=0, opener=_open_regular) as file:
                return import_stream(file, draft, self._limits, work, self._room(room))
        recipe = self._recipe(source)
        return ImageConfig(), build(recipe, draft, self._limits, work)

    def _room(self, room: int | None) -> Room | None:
        return None if room is None else Room(self._allowance, room)

    def _recipe(self, reference: Reference) -> Recipe:
        return suite_recipe(reference.name) if reference.kind is Kind.DEBIAN else self._recipes.get(reference.name)

    def _owner(self, reference: Reference) -> str:
        """Return whom an image of this name belongs to. What is made of this machine's recipes, files and Docker engine
        belongs to everybody; a server lets only administrators name files and the Docker engine."""
        return self._access.owner if reference.kind is Kind.OCI else ""

    def _find(self, name: str, owner: str) -> Image | None:
        """Return the owner's image of this name, else that of everybody."""
        return (self._store.find(name, owner) if owner else None) or self._store.find(name)

    def _current(self, reference: Reference, stamp: str) -> Image | None:
        image = self._find(str(reference), self._owner(reference))
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


def _key(name: str, owner: str) -> str:
    """Return what is locked while an image is made: other owners' images of this name are other images."""
    return f"{owner}\0{name}" if owner else name


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file. O_NONBLOCK avoids waiting for a writer if the path is a pipe."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not os.path.isfile(f"/proc/self/fd/{fd}"):
        os.close(fd)
        raise ImageError(f"{path!r} is not a file")
    return fd
