"""Transfer trees as tar archives, through a directory of the server that exists only for the request.

Its contents are charged to the user whose request it is, without the holes of sparse files, and nothing is accepted
that the disk of the sandbox could not hold. The server empties the parent directory when it starts, so the remains of
interrupted transfers do not stay.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from pathlib import Path

from starlette.exceptions import HTTPException

from atoll import sparse, workers
from atoll.archive.archive_limits import Budget, ImageLimits
from atoll.archive.decompress import plain
from atoll.archive.extract import extract
from atoll.archive.root import Root
from atoll.archive.work import Work
from atoll.buffers import Budgets, Reservation
from atoll.cancellation import finish, finish_or_stop
from atoll.errors import ImageError, SandboxResourceError
from atoll.guest import tree_copy
from atoll.manager import ManagedSandbox
from atoll.removal import remove_tree
from atoll.walking import walk

_CHUNK = 1 << 20
_MAX_ITEMS = 1_000_000
_ENTRY_BYTES = 256
_OVERHEAD = 16 << 20
"""An archive is larger than its contents, because of headers and padding. Twice the disk of a sandbox and this is the
maximum."""


class Transfers:
    """The directory of trees in transit, and how much of it each user takes."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Allow `max_bytes` for each user, and four times as many for all users."""
        self.folder = folder
        self.budgets = Budgets(max_bytes, 4 * max_bytes)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Transfer]:
        folder = Path(await workers.run(workers.TRANSFER, tempfile.mkdtemp, prefix="tree-", dir=self.folder))
        transfer = Transfer(folder, self.budgets.open(workers.account.get()))
        try:
            yield transfer
        finally:
            # This must happen whatever happens to the caller, and even if the caller's share of threads is taken.
            await finish(workers.run(workers.ENGINE, remove_tree, folder))
            transfer.reservation.close()


class Transfer:
    """One tree in transit."""

    def __init__(self, folder: Path, reservation: Reservation) -> None:
        self.folder, self.reservation = folder, reservation
        self.tree, self.archive = folder / "tree", folder / "archive"

    def take(self, size: int) -> None:
        """Reserve room for `size` more bytes. Raises SandboxResourceError."""
        if self.reservation.take(size) < size:
            raise SandboxResourceError(
                "your transfers take too much space on the server at once",
                hint="Wait for other transfers to finish, or transfer less at a time.",
            )

    def below(self, most: int | None) -> Callable[[int], None]:
        """Return a function like `take` that also limits the total to `most`, which is what the disk of a sandbox can
        hold."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            taken += size
            if most is not None and taken > most:
                raise SandboxResourceError(f"the tree does not fit on the sandbox's disk of {most} bytes")
            self.take(size)

        return take


async def pack(transfers: Transfers, sandbox: ManagedSandbox, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Return the archive piece by piece. If something cannot be read, the error is raised before the first piece."""
    held = contextlib.AsyncExitStack()
    try:
        transfer = await held.enter_async_context(transfers.open())
        async with sandbox.use():
            await tree_copy.copy_from(
                sandbox.access.connect,
                sandbox.access.path(path),
                transfer.tree,
                max_bytes=max_bytes,
                max_items=_MAX_ITEMS,
                room=transfer.take,
            )
    except BaseException:
        await held.aclose()
        raise
    return _pieces(transfer.tree, held)


async def unpack(
    transfers: Transfers, sandbox: ManagedSandbox, path: str, pieces: AsyncIterator[bytes], max_bytes: int
) -> None:
    """Unpack an archive into the sandbox. Nothing reaches the sandbox before the whole archive was read and
    validated."""
    most = sandbox.spec.limits.disk_bytes
    async with transfers.open() as transfer:
        room = transfer.below(None if most is None else 2 * most + _OVERHEAD)
        with transfer.archive.open("wb", buffering=0) as file:
            async for piece in pieces:
                room(await workers.run(workers.TRANSFER, sparse.write, file.fileno(), piece))
            sparse.end(file.fileno())
        work = Work()
        extracting = workers.run(workers.TRANSFER, unpack_archive, transfer, work, max_bytes, transfer.below(most))
        await finish_or_stop(extracting, work.cancel)
        await sandbox.copy_to(transfer.tree, path)


async def _pieces(tree: Path, held: contextlib.AsyncExitStack) -> AsyncGenerator[bytes, None]:
    """Yield the archive, which is written as it is sent and never exists as a whole."""
    async with held:
        archive = _Archive(tree)
        try:
            while data := await workers.run(workers.TRANSFER, archive.next):
                yield data
        finally:
            await finish(workers.run(workers.ENGINE, archive.close))


class _Archive:
    """The pieces of an archive, requested by one thread after another. A reader that is gone may have left a thread at
    work."""

    def __init__(self, tree: Path) -> None:
        self._pieces = _tar(tree)
        self._turn = threading.Lock()

    def next(self) -> bytes:
        with self._turn:
            return next(self._pieces, b"")

    def close(self) -> None:
        with self._turn:
            self._pieces.close()


def _tar(tree: Path) -> Generator[bytes, None, None]:
    """Yield the archive in pieces. No piece is empty or larger than `_CHUNK`."""
    if tree.is_dir() and not tree.is_symlink():
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield from _entry(".", tree, os.fstat(fd))
            for found in walk(fd):
                # Open it through its parent directory, because the whole path may be too long to be opened.
                place = Path(f"/proc/self/fd/{found.parent}", found.name)
                yield from _entry(f"./{os.fsdecode(found.path)}", place, found.info)
        finally:
            os.close(fd)
    else:
        yield from _entry(tree.name, tree, tree.lstat())
    yield bytes(2 * tarfile.BLOCKSIZE)


def _entry(name: str, place: Path, info: os.stat_result) -> Iterator[bytes]:
    """Yield one entry. Owners are left out, because ids mean nothing outside the sandbox."""
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(info.st_mode), info.st_mtime
    if stat.S_ISREG(info.st_mode):
        member.size = info.st_size
    elif stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(place)
    else:
        member.type = tarfile.DIRTYPE
    yield member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    if member.isreg():
        yield from _content(place, member.size)


def _content(place: Path, size: int) -> Iterator[bytes]:
    with place.open("rb", buffering=0) as file:
        for start in range(0, size, _CHUNK):
            yield file.read(min(_CHUNK, size - start))
    if size % tarfile.BLOCKSIZE:
        yield bytes(-size % tarfile.BLOCKSIZE)


class _Counting(Budget):
    """Counts each entry as some room, because a tree of empty files takes space as well."""

    def spend_entry(self) -> None:
        super().spend_entry()
        self.spend_room(_ENTRY_BYTES)


def unpack_archive(transfer: Transfer, work: Work, max_bytes: int, room: Callable[[int], None]) -> None:
    """Extract the archive with the same care as an untrusted image: nothing in it leads out of the tree."""
    transfer.tree.mkdir()
    limits = ImageLimits(total_bytes=max_bytes, file_bytes=max_bytes, entries=_MAX_ITEMS)
    budget = _Counting(limits, room=room)
    try:
        with transfer.archive.open("rb") as file, Root(transfer.tree) as root, plain(file, limits, work) as reader:
            result = extract(reader, root, budget, work, whiteouts=False, detail="archive")
    except ImageError as error:
        if budget.bytes_used > limits.total_bytes or budget.entries_used > limits.entries:
            raise HTTPException(413, f"the archive holds more than {max_bytes} bytes or {_MAX_ITEMS} files") from error
        raise ValueError(f"invalid archive: {error.reason}") from error
    if result.devices_skipped:
        raise ValueError("invalid archive: it may contain only files, directories and links")
