"""The layers of registries as they were transferred, kept so that the next pull does not transfer them again.

    images/blobs/sha256/<digest>-<registry>     a whole blob; it gets this name after its digest was verified
    images/blobs/partial/<digest>-<registry>    the beginning of one; whoever goes on with it holds a lock on the file

The name contains a hash of the registry, because a blob is only for pulls from the registry that it came from. Any
registry can claim to have a blob of some digest; only the one that gave it can say who else may have it. The least
recently used blobs are removed when all of them together take too much space.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.archive.work import Work
from atoll.images.locks import remove_if_free, same_file, try_lock

BLOB_CACHE_BYTES = 8 << 30
_CHUNK = 1 << 20
_POLL_S = 0.02
_PATIENCE_S = 5.0
"""How long to wait for another writer of the same blob that makes no progress."""
_KEEP_PARTIAL_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class BlobKey:
    registry: str
    digest: str

    @property
    def file_name(self) -> str:
        """The name of its file. The digest was checked when its manifest was parsed."""
        return f"{self.digest.removeprefix('sha256:')}-{hashlib.sha256(self.registry.encode()).hexdigest()[:16]}"


class Blobs:
    """The cache. Its methods block; they may be called from many threads and processes at once."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._whole, self._partial = directory / "sha256", directory / "partial"
        self.most_bytes = most_bytes

    def take(self, key: BlobKey, target: Path, work: Work) -> bool:
        """Make a blob available under another name, which outlives its removal from the cache. Returns False if it is
        not here. One that was damaged on disk is removed."""
        path = self._whole / key.file_name
        try:
            os.link(path, target)
        except FileNotFoundError:
            return False
        if _digest_of(target, work) == key.digest:
            os.utime(target)
            return True
        target.unlink()
        path.unlink(missing_ok=True)
        return False

    def has(self, key: BlobKey) -> bool:
        return (self._whole / key.file_name).exists()

    @contextlib.contextmanager
    def writing(self, key: BlobKey, aside: Path, work: Work) -> Iterator[Path]:
        """Provide the file that a blob is written to, with what an earlier writer left of it.

        While another writer makes progress, this waits for it: look then whether the blob is here. If it makes none,
        the file is `aside`, which is new and is not kept.
        """
        for path in (self._whole, self._partial):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._partial / key.file_name
        fd = self._lock(path, work)
        if fd is None:
            aside.touch(0o600, exist_ok=True)
            yield aside
            return
        try:
            yield path
        finally:
            os.close(fd)

    def keep(self, key: BlobKey, written: Path, target: Path) -> None:
        """Add a blob whose digest the caller has verified to the cache, and give it the name `target`, too."""
        fd = os.open(written, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        if written != target:
            os.link(written, target)
        whole = self._whole / key.file_name
        if written.parent == self._partial:
            written.replace(whole)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(written, whole)

    def sweep(self, most_bytes: int | None = None, *, unused_s: float = 0.0) -> int:
        """Remove the least recently used files until the rest takes at most `most_bytes`, by default what the cache
        may take, and old beginnings. Files that are being written stay, and those used within the last `unused_s`
        seconds. Returns how many bytes were removed."""
        most = self.most_bytes if most_bytes is None else most_bytes
        found: list[tuple[float, int, Path]] = []
        for folder in (self._whole, self._partial):
            with contextlib.suppress(FileNotFoundError):
                for entry in os.scandir(folder):
                    with contextlib.suppress(FileNotFoundError):
                        info = entry.stat(follow_symlinks=False)
                        found.append((info.st_mtime, info.st_size, Path(entry.path)))
        total, freed, now = sum(size for _, size, _ in found), 0, time.time()
        for used_at, size, path in sorted(found):
            is_old = path.parent == self._partial and used_at < now - _KEEP_PARTIAL_S
            is_unused = used_at <= now - unused_s
            if ((total - freed > most and is_unused) or is_old) and remove_if_free(path):
                freed += size
        return freed

    @property
    def size_bytes(self) -> int:
        """What the whole blobs and the beginnings take."""
        size = 0
        for folder in (self._whole, self._partial):
            with contextlib.suppress(FileNotFoundError):
                for entry in os.scandir(folder):
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_size
        return size

    def _lock(self, path: Path, work: Work) -> int | None:
        """Open and lock a beginning. Returns None if another writer has it and makes no progress."""
        last, since = -1, time.monotonic()
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if try_lock(fd):
                    if same_file(fd, path):
                        return fd
                    fcntl.flock(fd, fcntl.LOCK_UN)
                    size = -1  # its writer has just finished
                else:
                    size = os.fstat(fd).st_size
                if size != last:
                    last, since = size, time.monotonic()
                elif time.monotonic() - since > _PATIENCE_S:
                    os.close(fd)
                    return None
                work.sleep(_POLL_S)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def _digest_of(path: Path, work: Work) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            work.check()
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"
