"""The store of the images of this machine.

    images/roots/<digest>/rootfs     a flattened root file system, never changed, shared by all sandboxes
    images/roots/<digest>/meta.json  its digest, size and number of entries, measured when it was stored
    images/names/<hash>.json         one reference, the digest it points to, and the configuration
    images/leases/<sandbox id>       the digest that a sandbox uses, which prevents its removal
    images/tmp/<random>/             an image that is being made; its maker holds a lock on the directory
    images/locks/                    lock files, which exist only while held

The digest is that of the tree itself, so equal images are stored once, and `verify` needs only the files. An image is
made in `tmp`, synced to disk, and then renamed: after a crash at any moment it either exists and is complete, or it
does not exist and `gc` removes the remains. Changes of names, leases and roots happen under one lock, which is held for
milliseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from atoll import durable
from atoll.archive import tree
from atoll.archive.work import Work
from atoll.errors import ImageError, ImageNotFoundError, SpecError
from atoll.images.locks import locked, remove_if_free, sync_file_system, try_lock
from atoll.images.oci_documents import ImageConfig
from atoll.images.reference import Kind

_SANDBOX_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z")
READABLE = 0o755
PASSABLE = 0o711
"""These modes are set regardless of the umask, because sandboxes reach their root with other user ids."""
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class Image:
    """A root file system to start from. `root` is None for the image `host`, whose view the engine makes."""

    reference: str
    kind: Kind
    digest: str = ""
    root: Path | None = None
    config: ImageConfig = field(default_factory=ImageConfig)
    size_bytes: int = 0
    created_at: float = 0.0
    source: str = ""
    """The version of the source, to detect changes: a manifest's or recipe's digest, or a file's inode and times."""
    notes: tuple[str, ...] = ()
    """Messages about parts that were left out when it was unpacked, such as device nodes."""
    private: bool = False
    """Whether it was pulled with a login. Other users may use it only if the registry lets them pull it, too."""


HOST = Image("host", Kind.HOST)


@dataclass(frozen=True, slots=True)
class Collected:
    """The result of `gc`: what it removed."""

    digests: tuple[str, ...] = ()
    size_bytes: int = 0
    leftovers: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """An image that is being made. Its directories are removed at the end, except for a committed `rootfs`."""

    rootfs: Path
    scratch: Path


class Store:
    """The image store. Its methods block; they may be called from many threads and processes at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._roots, self._names = directory / "roots", directory / "names"
        self._leases, self._tmp, self._locks = directory / "leases", directory / "tmp", directory / "locks"

    def find(self, reference: str) -> Image | None:
        try:
            return self._load(self._name_path(reference))
        except FileNotFoundError:
            return None

    def get(self, reference: str) -> Image:
        image = self.find(reference)
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

    def commit(self, draft: Draft, image: Image, work: Work) -> Image:
        """Check and measure a finished draft, and store it as the image of a name."""
        tree.settle(draft.rootfs)
        measured = tree.measure(draft.rootfs, work)
        meta = draft.rootfs.parent / "meta.json"
        durable.write(meta, json.dumps(asdict(measured), indent=1), 0o644, sync=True)
        work.report("check", "writing to disk", measured.size_bytes)
        sync_file_system(draft.rootfs)
        os.chmod(draft.rootfs.parent, PASSABLE)
        record = asdict(image) | {
            "digest": measured.digest,
            "size_bytes": measured.size_bytes,
            "created_at": time.time(),
        }
        del record["root"]
        with self._changing(work):
            target = self._root_path(measured.digest)
            if not target.exists():
                draft.rootfs.parent.rename(target)
                durable.sync_directory(self._roots)
            durable.write(self._name_path(image.reference), json.dumps(record, indent=1), sync=True)
        return self.get(image.reference)

    def publish(self, reference: str, work: Work) -> None:
        """Mark an image as not private, because the registry served it without a login."""
        path = self._name_path(reference)
        with self._changing(work), contextlib.suppress(FileNotFoundError):
            record = json.loads(path.read_bytes()) | {"private": False}
            durable.write(path, json.dumps(record, indent=1), sync=True)

    def verify(self, reference: str, work: Work) -> tree.Measure:
        """Read the whole image again. Raises ImageError if any content, mode or owner has changed."""
        image = self.get(reference)
        assert image.root is not None
        measured = tree.measure(image.root, work)
        if measured.digest != image.digest:
            raise ImageError(
                f"the image {reference!r} was changed on disk or is damaged", hint="Remove it and get it again."
            )
        return measured

    def remove(self, reference: str, work: Work) -> None:
        """Remove a name, and the files if it was their last one. Raises ImageError if sandboxes still use the files."""
        self._prepare()
        with self._draining() as trash, self._changing(work):
            image = self.get(reference)
            others = [other for other in self._all().values() if other.digest == image.digest]
            users = [sandbox for sandbox, digest in self.leases().items() if digest == image.digest]
            if len(others) == 1 and users:
                raise ImageError(
                    f"the image {reference!r} is used by {len(users)} sandboxes, such as {users[0]}",
                    hint="Delete these sandboxes first.",
                )
            self._name_path(reference).unlink()
            if len(others) == 1:
                trash.append(self._discard(self._root_path(image.digest)))

    def gc(self, work: Work) -> Collected:
        """Remove images without a name and a lease, and leftovers of dead processes.

        Images that are in use or being made are kept.
        """
        self._prepare()
        digests, size, leftovers = [], 0, 0
        with self._draining() as trash, self._changing(work):
            kept = {image.digest for image in self._all().values()} | set(self.leases().values())
            for path in self._roots.iterdir():
                digest = f"sha256:{path.name}"
                if digest not in kept:
                    with contextlib.suppress(OSError, ValueError, KeyError):
                        size += int(json.loads((path / "meta.json").read_bytes())["size_bytes"])
                    digests.append(digest)
                    trash.append(self._discard(path))
            for path in set(self._tmp.iterdir()) - set(trash):
                if _abandoned(path):
                    leftovers += 1
                    trash.append(path)
            for folder in (self._names, self._leases):
                for path in folder.glob(".*"):
                    leftovers += 1
                    path.unlink(missing_ok=True)
            leftovers += sum(remove_if_free(path) for path in self._locks.iterdir() if path.name != "store")
        return Collected(tuple(digests), size, leftovers)

    def lease(self, sandbox_id: str, digest: str, work: Work) -> Path:
        """Prevent the removal of an image while a sandbox uses it. Returns the image's root.

        Raises ImageNotFoundError if the image was removed.
        """
        self._prepare()
        path = self._lease_path(sandbox_id)
        with self._changing(work):
            rootfs = self._root_path(digest) / "rootfs"
            if not rootfs.is_dir():
                raise ImageNotFoundError(
                    f"there is no image {digest} on this machine", hint="Pull, build or import it again."
                )
            durable.write(path, digest, sync=True)
        return rootfs

    def root(self, digest: str) -> Path:
        """Return the path of the root with this digest, which need not exist."""
        return self._root_path(digest) / "rootfs"

    def of_digest(self, digest: str) -> Image | None:
        """Return one of the images with this digest, if there is one."""
        return next((image for image in self._all().values() if image.digest == digest), None)

    def leased_by(self, sandbox_id: str) -> str:
        """Return the digest that a sandbox uses, or "" if it has no lease."""
        try:
            return self._lease_path(sandbox_id).read_text().strip()
        except FileNotFoundError:
            return ""

    def release(self, sandbox_id: str) -> None:
        """End the lease of a sandbox. May be repeated."""
        self._lease_path(sandbox_id).unlink(missing_ok=True)

    def leases(self) -> dict[str, str]:
        """Return the leased digest for each sandbox id. The caller must release the leases of deleted sandboxes,
        because the store does not know which sandboxes exist."""
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for path in self._leases.iterdir():
                if not path.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        found[path.name] = path.read_text().strip()
        return found

    def _prepare(self) -> None:
        """Create the directories. Sandboxes with other user ids can traverse `roots`; the others are private."""
        for path in (self.directory, self._roots):
            if not path.is_dir():
                path.mkdir(parents=True, exist_ok=True)
                os.chmod(path, PASSABLE)
        for path in (self._names, self._leases, self._tmp, self._locks):
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
            value = json.loads(path.read_bytes())
            config = value.pop("config")
            for key in ("entrypoint", "cmd", "exposed_ports", "volumes", "shell"):
                config[key] = tuple(config.get(key, ()))
            value["notes"] = tuple(value["notes"])
            value["kind"] = Kind(value["kind"])
            root = self._root_path(value["digest"]) / "rootfs"
            image = Image(**value, config=ImageConfig(**config), root=root)
        except (KeyError, TypeError, ValueError) as error:
            raise ImageError(
                f"the record {path} cannot be read", hint="Remove this file and get the image again."
            ) from error
        return image if root.is_dir() else None

    def _name_path(self, reference: str) -> Path:
        return self._names / f"{hashlib.sha256(reference.encode()).hexdigest()[:40]}.json"

    def _root_path(self, digest: str) -> Path:
        if not _DIGEST.match(digest):
            raise SpecError(f"{digest[:80]!r} is not the digest of an image")
        return self._roots / digest.removeprefix("sha256:")

    def _lease_path(self, sandbox_id: str) -> Path:
        if not _SANDBOX_ID.match(sandbox_id):
            raise SpecError(f"{sandbox_id[:80]!r} is not the id of a sandbox")
        return self._leases / sandbox_id


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
