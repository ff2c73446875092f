"""Archives that ADD unpacks. They are not trusted: `atoll.archive` reads them, into a private directory of the host,
and what is there goes the same way into the sandbox as any other file."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from atoll import workers
from atoll.archive.archive_limits import Budget, ImageLimits
from atoll.archive.decompress import plain
from atoll.archive.extract import extract
from atoll.archive.root import Root
from atoll.archive.tar_stream import TarStream
from atoll.archive.work import Work, WorkCancelledError
from atoll.builds.site import Site
from atoll.builds.source_tree import Source, SourceTree
from atoll.cancellation import finish_or_stop
from atoll.errors import BuildError, ImageError
from atoll.images.locks import try_lock
from atoll.removal import remove_tree

_FOLDER = "builds"
_DRAFTS = "drafts"
_NEW_S = 60.0


def is_archive(tree: SourceTree, source: Source) -> bool:
    """Return whether a source is a tar archive, compressed or not, according to its content."""
    if source.is_directory:
        return False
    limits, work = ImageLimits(), Work()
    with os.fdopen(tree.open(source.entries[0]), "rb") as file:
        try:
            with plain(file, limits, work) as stream:
                return next(iter(TarStream(stream, Budget(limits), require_end=False)), None) is not None
        except (ImageError, OSError):
            return False


@asynccontextmanager
async def unpacked(site: Site, tree: SourceTree, source: Source) -> AsyncIterator[tuple[SourceTree, Source]]:
    """Provide what is in an archive, as a tree and the source that is all of it."""
    work = Work(timeout_s=max(site.deadline.left(), 1.0))
    home = drafts_of(site.settings.data_dir)
    limits = ImageLimits()
    most = site.request.limits.disk_bytes or site.settings.resources.sandbox.disk_bytes
    if most is not None:
        limits = ImageLimits(total_bytes=most)
    with private_directory(home) as directory:

        def unpack() -> None:
            with os.fdopen(tree.open(source.entries[0]), "rb") as file, Root(directory) as root:
                with plain(file, limits, work) as stream:
                    found = extract(stream, root, Budget(limits), work, require_end=False, whiteouts=False)
            for note in found.notes:
                tree.notes.append(note)

        try:
            await finish_or_stop(workers.run(workers.IMAGE, unpack), work.cancel)
        except (ImageError, WorkCancelledError) as error:
            raise BuildError(f"the archive cannot be unpacked: {error}") from error
        for note in tree.notes:
            site.reporter.warn(note)
        tree.notes.clear()
        with Root(directory) as root:
            inside = SourceTree(root.fd, "the archive", keeps_owners=os.geteuid() == 0)
            sources = await workers.run(workers.TRANSFER, inside.select, "/")
            yield inside, sources[0]


def builds_of(data_dir: Path) -> Path:
    """Return the directory for what builds keep beside steps and images."""
    return data_dir / _FOLDER


def drafts_of(data_dir: Path) -> Path:
    return builds_of(data_dir) / _DRAFTS


@contextmanager
def private_directory(home: Path) -> Iterator[Path]:
    """Provide an empty directory, removed at the end. A lock shows that its process is alive."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = home / secrets.token_hex(8)
    path.mkdir(mode=0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try_lock(fd)
        yield path
    finally:
        remove_tree(path)
        os.close(fd)


def sweep_drafts(home: Path) -> None:
    """Remove the directories of processes that died."""
    if not home.is_dir():
        return
    for path in home.iterdir():
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            # A new one may not have its lock yet.
            if os.fstat(fd).st_ctime < time.time() - _NEW_S and try_lock(fd):
                remove_tree(path)
        finally:
            os.close(fd)
