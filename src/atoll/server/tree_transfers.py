"""Trees as tar archives. They pass through a directory of the server that exists only for the request.

What lies there is counted for the user whose request it is, without the holes of sparse files, and nothing is taken
that the disk of the sandbox could not hold. Each is made in a place that the server empties when it starts: what was
under way when one is killed does not stay.
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
_OVERHEAD = 16 << 20
"""An archive is larger than what is in it: headers, padding. Twice the disk of a sandbox and this is too much."""


class Transfers:
    """Where trees lie on their way in and out, and how much of it each user takes."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """At most so many bytes for each user, and four times as many for all."""
        self.folder = folder
        self.budgets = Budgets(max_bytes, 4 * max_bytes)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Transfer]:
        folder = Path(await workers.run(workers.TRANSFER, tempfile.mkdtemp, prefix="tree-", dir=self.folder))
        transfer = Transfer(folder, self.budgets.open(workers.account.get()))
        try:
            yield transfer
        finally:
            # Whatever happens to the caller, and also if the caller's share of threads is taken.
            await finish(workers.run(workers.ENGINE, remove_tree, folder))
            transfer.reservation.close()


class Transfer:
    """One tree on its way."""

    def __init__(self, folder: Path, reservation: Reservation) -> None:
        self.folder, self.reservation = folder, reservation
        self.tree, self.archive = folder / "tree", folder / "archive"

    def take(self, size: int) -> None:
        """Room for so many bytes more. Raises SandboxResourceError."""
        if self.reservation.take(size) < size:
            raise SandboxResourceError(
                "your transfers take too much space on the server at once",
                hint="Wait for other transfers to finish, or transfer less at a time.",
            )

    def below(self, most: int | None) -> Callable[[int], None]:
        """`take`, up to so many bytes in all: what the disk of a sandbox has."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            taken += size
            if most is not None and taken > most:
                raise SandboxResourceError(f"the tree does not fit on the sandbox's disk of {most} bytes")
            self.take(size)

        return take


async def pack(transfers: Transfers, sandbox: ManagedSandbox, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The archive, piece by piece. What cannot be read is an error before the first."""
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
    """Nothing reaches the sandbox before the whole archive was read and understood."""
    most = sandbox.spec.limits.disk_bytes
    async with transfers.open() as transfer:
        room = transfer.below(None if most is None else 2 * most + _OVERHEAD)
        with transfer.archive.open("wb", buffering=0) as file:
            async for piece in pieces:
                room(await workers.run(workers.TRANSFER, sparse.write, file.fileno(), piece))
            sparse.end(file.fileno())
        work = Work()
        extracting = workers.run(workers.TRANSFER, _extract, transfer, work, max_bytes, transfer.below(most))
        await finish_or_stop(extracting, work.cancel)
        await sandbox.copy_to(transfer.tree, path)


async def _pieces(tree: Path, held: contextlib.AsyncExitStack) -> AsyncGenerator[bytes, None]:
    """The archive is written as it is sent: it is never there as a whole."""
    async with held:
        archive = _Archive(tree)
        try:
            while data := await workers.run(workers.TRANSFER, archive.next):
                yield data
        finally:
            await finish(workers.run(workers.ENGINE, archive.close))


class _Archive:
    """The pieces, asked for by one thread after another. A reader who is gone may have left a thread at work on one."""

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
    """None of its pieces is empty, and none larger than `_CHUNK`."""
    if tree.is_dir() and not tree.is_symlink():
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield from _entry(".", tree, os.fstat(fd))
            for found in walk(fd):
                # By the open parent: the whole path may be longer than any that can be opened.
                place = Path(f"/proc/self/fd/{found.parent}", found.name)
                yield from _entry(f"./{os.fsdecode(found.path)}", place, found.info)
        finally:
            os.close(fd)
    else:
        yield from _entry(tree.name, tree, tree.lstat())
    yield bytes(2 * tarfile.BLOCKSIZE)


def _entry(name: str, place: Path, info: os.stat_result) -> Iterator[bytes]:
    """Owners are left out: ids mean nothing outside of the sandbox."""
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


def _extract(transfer: Transfer, work: Work, max_bytes: int, room: Callable[[int], None]) -> None:
    """With the same care as an image of a stranger: nothing in it leads out of the tree."""
    transfer.tree.mkdir()
    limits = ImageLimits(total_bytes=max_bytes, file_bytes=max_bytes, entries=_MAX_ITEMS)
    budget = Budget(limits, room=room)
    try:
        with transfer.archive.open("rb") as file, Root(transfer.tree) as root, plain(file, limits, work) as reader:
            result = extract(reader, root, budget, work, whiteouts=False, detail="archive")
    except ImageError as error:
        if budget.bytes_used > limits.total_bytes or budget.entries_used > limits.entries:
            raise HTTPException(413, f"the archive holds more than {max_bytes} bytes or {_MAX_ITEMS} files") from error
        raise ValueError(f"invalid archive: {error.reason}") from error
    if result.devices_skipped:
        raise ValueError("invalid archive: it may contain only files, directories and links")
