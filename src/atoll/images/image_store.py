"""The store of the images of this machine.

    images/roots/<digest>/           the files of one layer, never changed, shared by all sandboxes (`layer_roots.py`)
    images/names/<hash>.json         one reference of one owner, the digest it points to, and the configuration
    images/leases/<sandbox id>       the digest that a sandbox uses, which prevents its removal
    images/blobs/                    layers of registries as they were transferred (`blobs.py`)
    images/tmp/<random>/             an image that is being made; its maker holds a lock on the directory
    images/locks/                    lock files, which exist only while held

The digest is that of the tree itself and of what lies below, so equal images are stored once, and `verify` needs only
the files. An image is made in `tmp`, synced to disk, and then renamed: after a crash at any moment it either exists and
is complete, or it does not exist and `gc` removes the remains. A layer is kept as long as a name, a lease or a layer
above needs it. Changes of names, leases and roots happen under one lock, which is held for milliseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from atoll import durable
from atoll.archive import tree
from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError
from atoll.images import stacking
from atoll.images.image import Collected, Draft, Image, image_of, record_of
from atoll.images.image_leases import ImageLeases
from atoll.images.layer_roots import MAX_LAYERS, LayerInfo, LayerRoots
from atoll.images.locks import locked, remove_if_free, sync_file_system, sync_tree, try_lock

READABLE = 0o755
PASSABLE = 0o711
"""These modes are set regardless of the umask, because sandboxes reach their root with other user ids."""
_READER = "reader-"
"""What the leases of processes that read an image begin with. Each has a lock of the same name while it lives."""
_SMALL = 256
"""The number of files up to which syncing them one by one is faster than syncing the whole file system."""


class Store:
    """The image store. Its methods block; they may be called from many threads and processes at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._roots, self._leases = LayerRoots(directory / "roots"), ImageLeases(directory / "leases")
        self._names, self._tmp, self._locks = directory / "names", directory / "tmp", directory / "locks"

    def find(self, reference: str, owner: str = "") -> Image | None:
        """Return the image that has this name for its owner. The empty owner stands for everybody."""
        try:
            return self._load(self._name_path(reference, owner))
        except FileNotFoundError:
            return None

    def get(self, reference: str, owner: str = "") -> Image:
        image = self.find(reference, owner)
        if image is None:
            raise ImageNotFoundError(
                f"there is no image {reference!r} on this machine", hint="Pull, build or import it first."
            )
        return image

    def ls(self) -> list[Image]:
        return sorted(self._all().values(), key=lambda image: image.reference)

    @contextlib.contextmanager
    def making(self, reference: str, work: Work) -> Iterator[None]:
        """Hold the lock for making the image of one name. Others wait here and then find the finished image."""
        self._prepare()
        key = hashlib.sha256(reference.encode()).hexdigest()[:32]
        with locked(self._locks / key, work, f"another process is making {reference}"):
            yield

    @contextlib.contextmanager
    def draft(self, work: Work) -> Iterator[Draft]:
        self._prepare()
        path = self._tmp / secrets.token_hex(8)
        with self._changing(work):
            path.mkdir(mode=0o700)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try_lock(fd)
        try:
            draft = Draft(path / "root" / "rootfs", path / "scratch")
            draft.rootfs.mkdir(parents=True)
            draft.scratch.mkdir()
            os.chmod(draft.rootfs, READABLE)
            yield draft
        finally:
            tree.remove(path)
            os.close(fd)

    def commit(self, draft: Draft, image: Image, work: Work, *, below: str = "") -> Image:
        """Check and measure a finished draft, and store it as the image of its reference and owner.

        With `below`, the draft is a layer above the image of that digest. A stack that would get too deep is flattened
        down to its lowest layer. Raises ImageNotFoundError if there is no image `below`.
        """
        self.add_layer(draft, work, below=below, image=image)
        return self.get(image.reference, image.owner)

    def add_layer(self, draft: Draft, work: Work, *, below: str = "", image: Image | None = None) -> str:
        """As `commit`, but without an image the layer has no name yet, and `gc` may remove it. Returns the digest."""
        below = self._prepared(draft, below, work)
        measured = self._roots.measured(draft.rootfs, below, work)
        name, description = self._roots.description(measured, below)
        durable.write(draft.rootfs.parent / name, description, 0o644, sync=True)
        work.report("check", "writing to disk", measured.size_bytes)
        if measured.entries <= _SMALL:
            sync_tree(draft.rootfs.parent)
        else:
            sync_file_system(draft.rootfs)
        os.chmod(draft.rootfs.parent, PASSABLE)
        with self._changing(work):
            if below:
                self._roots.stack(below)  # raises ImageNotFoundError if it was removed meanwhile
            target = self._roots.path(measured.digest)
            if not target.exists():
                draft.rootfs.parent.rename(target)
                durable.sync_directory(self._roots.directory)
            if image is not None:
                self._name(image, measured.digest)
        return measured.digest

    def name(self, image: Image, digest: str, work: Work) -> Image:
        """Give a stored image one more name, with a configuration of its own. Raises ImageNotFoundError."""
        self._prepare()
        with self._changing(work):
            self._name(image, digest)
        return self.get(image.reference, image.owner)

    def _prepared(self, draft: Draft, below: str, work: Work) -> str:
        """Bring a draft into its final form. Return the digest of what it lies on."""
        if not below:
            tree.settle(draft.rootfs)
            return ""
        tree.settle_layer(draft.rootfs)
        stack = self._roots.stack(below)
        if len(stack) < MAX_LAYERS:
            return below
        lower = tuple(self._roots.rootfs(digest) for digest in stack[:-1])
        merged = draft.scratch / "merged"
        stacking.merge(draft.rootfs, lower, self._roots.rootfs(stack[-1]), merged, work)
        tree.remove(draft.rootfs)
        merged.rename(draft.rootfs)
        return stack[-1]

    def _name(self, image: Image, digest: str) -> None:
        stack, size = self._roots.stack(digest), self._roots.total_bytes(digest)
        named = dataclasses.replace(image, digest=digest, size_bytes=size, created_at=time.time())
        record = json.dumps(record_of(named, stack), indent=1)
        durable.write(self._name_path(image.reference, image.owner), record, sync=True)

    def publish(self, reference: str, work: Work, owner: str = "") -> None:
        """Mark an image as not private, because the registry served it without a login."""
        path = self._name_path(reference, owner)
        with self._changing(work), contextlib.suppress(FileNotFoundError):
            record = json.loads(path.read_bytes()) | {"private": False}
            durable.write(path, json.dumps(record, indent=1), sync=True)

    def verify(self, reference: str, work: Work, owner: str = "") -> tree.Measure:
        """Read the whole image again, layer by layer. Raises ImageError if any content, mode or owner has changed."""
        image = self.get(reference, owner)
        stack = self._roots.stack(image.digest)
        size = entries = 0
        for digest, below in zip(stack, (*stack[1:], ""), strict=True):
            measured = self._roots.measured(self._roots.rootfs(digest), below, work)
            if measured.digest != digest:
                raise ImageError(
                    f"the image {reference!r} was changed on disk or is damaged", hint="Remove it and get it again."
                )
            size, entries = size + measured.size_bytes, entries + measured.entries
        return tree.Measure(image.digest, size, entries)

    def remove(self, reference: str, work: Work, owner: str = "") -> None:
        """Remove a name, and the layers that nothing else needs. Raises ImageError if the name is the last one of its
        files and sandboxes still use them."""
        self._prepare()
        with self._draining() as trash, self._changing(work):
            image = self.get(reference, owner)
            path = self._name_path(reference, owner)
            others = [other.digest for place, other in self._all().items() if place != path]
            users = [sandbox for sandbox, digest in self.leases().items() if digest == image.digest]
            if image.digest not in others and users:
                raise ImageError(
                    f"the image {reference!r} is used by {len(users)} sandboxes, such as {users[0]}",
                    hint="Delete these sandboxes first.",
                )
            path.unlink()
            kept = self._roots.with_all_below([*others, *self.leases().values()])
            # The topmost is removed first: what remains of a stack after a crash has everything that it lies on.
            for layer in image.layers:
                if f"sha256:{layer.parent.name}" not in kept:
                    trash.append(self._discard(layer.parent))

    def gc(self, work: Work) -> Collected:
        """Remove layers that no name, no lease and no other layer needs, and leftovers of dead processes.

        Images that are in use or being made are kept.
        """
        self._prepare()
        digests, size, leftovers = [], 0, 0
        self._release_dead_readers()
        with self._draining() as trash, self._changing(work):
            named = [image.digest for image in self._all().values()]
            kept = self._roots.with_all_below([*named, *self.leases().values()])
            for path in self._roots.directory.iterdir():
                digest = f"sha256:{path.name}"
                if digest not in kept:
                    size += self._roots.own_bytes(digest)
                    digests.append(digest)
                    trash.append(self._discard(path))
            for path in set(self._tmp.iterdir()) - set(trash):
                if _abandoned(path):
                    leftovers += 1
                    trash.append(path)
            for folder in (self._names, self._leases.directory):
                for path in folder.glob(".*"):
                    leftovers += 1
                    path.unlink(missing_ok=True)
            leftovers += sum(remove_if_free(path) for path in self._locks.iterdir() if path.name != "store")
        return Collected(tuple(digests), size, leftovers)

    def lease(self, sandbox_id: str, digest: str, work: Work, *, sync: bool = True) -> tuple[Path, ...]:
        """Prevent the removal of an image while a sandbox uses it. Returns the image's layers, topmost first.

        Without `sync`, the lease may be lost when the machine crashes. Raises ImageNotFoundError if the image was
        removed.
        """
        self._prepare()
        with self._changing(work):
            layers = self._roots.layers(digest)
            self._leases.take(sandbox_id, digest, sync=sync)
        return layers

    def root(self, digest: str) -> Path:
        """Return the path of the topmost layer of this digest, which need not exist."""
        return self._roots.rootfs(digest)

    def layers(self, digest: str) -> tuple[Path, ...]:
        """Return the layers of an image, topmost first. Raises ImageNotFoundError if one is missing."""
        return self._roots.layers(digest)

    def layer_infos(self, digest: str) -> tuple[LayerInfo, ...]:
        """Return the layers of an image with their digests and sizes, topmost first."""
        return self._roots.infos(digest)

    def layer_digests(self) -> list[str]:
        """Return the digests of all layers that are stored."""
        return self._roots.all()

    @contextlib.contextmanager
    def reading(self, image: Image, work: Work) -> Iterator[None]:
        """Prevent the removal of an image while this process reads it. Raises ImageNotFoundError if it was removed."""
        user = f"{_READER}{secrets.token_hex(8)}"
        self._prepare()
        with locked(self._locks / user, work):
            self.lease(user, image.digest, work, sync=False)
            try:
                yield
            finally:
                self.release(user)

    def of_digest(self, digest: str) -> Image | None:
        """Return one of the images with this digest, if there is one."""
        return next((image for image in self._all().values() if image.digest == digest), None)

    def leased_by(self, sandbox_id: str) -> str:
        """Return the digest that a sandbox uses, or "" if it has no lease."""
        return self._leases.of(sandbox_id)

    def release(self, sandbox_id: str) -> None:
        """End the lease of a sandbox. May be repeated."""
        self._leases.release(sandbox_id)

    def leases(self) -> dict[str, str]:
        """Return the leased digest for each sandbox id. The caller must release the leases of deleted sandboxes,
        because the store does not know which sandboxes exist."""
        return self._leases.all()

    def _release_dead_readers(self) -> None:
        for user in self.leases():
            lock = self._locks / user
            if user.startswith(_READER) and (not lock.exists() or remove_if_free(lock)):
                self.release(user)

    def _prepare(self) -> None:
        """Create the directories. Sandboxes with other user ids can traverse `roots`; the others are private."""
        for path in (self.directory, self._roots.directory):
            if not path.is_dir():
                path.mkdir(parents=True, exist_ok=True)
                os.chmod(path, PASSABLE)
        for path in (self._names, self._leases.directory, self._tmp, self._locks):
            path.mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def _changing(self, work: Work) -> Iterator[None]:
        with locked(self._locks / "store", work):
            yield

    @contextlib.contextmanager
    def _draining(self) -> Iterator[list[Path]]:
        """Collect trees to remove at the end. They are in `tmp`, so that `gc` removes them after a crash."""
        trash: list[Path] = []
        yield trash
        for path in trash:
            tree.remove(path)

    def _discard(self, path: Path) -> Path:
        trash = self._tmp / secrets.token_hex(8)
        path.rename(trash)
        return trash

    def _all(self) -> dict[Path, Image]:
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for path in self._names.glob("*.json"):
                with contextlib.suppress(FileNotFoundError):
                    image = self._load(path)
                    if image is not None:
                        found[path] = image
        return found

    def _load(self, path: Path) -> Image | None:
        try:
            image = image_of(json.loads(path.read_bytes()), self._roots.rootfs)
        except (KeyError, TypeError, ValueError) as error:
            raise ImageError(
                f"the record {path} cannot be read", hint="Remove this file and get the image again."
            ) from error
        return image if all(layer.is_dir() for layer in image.layers) else None

    def _name_path(self, reference: str, owner: str = "") -> Path:
        key = f"{owner}\0{reference}" if owner else reference
        return self._names / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"


def _abandoned(path: Path) -> bool:
    """Return whether the process that made this has ended."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return try_lock(fd)
    finally:
        os.close(fd)
