"""Trees as tar archives. They pass through a directory of the server that exists only for the request.

Each is made in a place that the server empties when it starts: what was under way when one is killed does not stay.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tarfile
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

from starlette.exceptions import HTTPException

from atoll import workers
from atoll.errors import ImageError
from atoll.guest import trees
from atoll.images.decompress import plain
from atoll.images.extract import extract
from atoll.images.limits import Budget, ImageLimits
from atoll.images.root import Root
from atoll.images.work import Work
from atoll.manager import ManagedSandbox
from atoll.removal import remove_tree
from atoll.walking import walk

_CHUNK = 1 << 20
_MOST_ITEMS = 1_000_000


async def pack(sandbox: ManagedSandbox, path: str, max_bytes: int, place: Path) -> AsyncGenerator[bytes, None]:
    """The archive, piece by piece. What cannot be read is an error before the first."""
    folder = Path(await workers.run(workers.TRANSFER, tempfile.mkdtemp, prefix="tree-", dir=place))
    archive = folder / "archive"
    try:
        async with sandbox.use():
            await trees.copy_from(
                sandbox._connect, sandbox._path(path), folder / "tree", max_bytes=max_bytes, max_items=_MOST_ITEMS
            )
        await workers.run(workers.TRANSFER, _write, folder / "tree", archive)
    except BaseException:
        await workers.run(workers.TRANSFER, remove_tree, folder)
        raise
    return _pieces(archive, folder)


async def unpack(sandbox: ManagedSandbox, path: str, pieces: AsyncIterator[bytes], max_bytes: int, place: Path) -> None:
    """Nothing reaches the sandbox before the whole archive was read and understood."""
    folder = Path(await workers.run(workers.TRANSFER, tempfile.mkdtemp, prefix="tree-", dir=place))
    try:
        with (folder / "archive").open("wb") as file:
            async for piece in pieces:
                await workers.run(workers.TRANSFER, file.write, piece)
        await workers.run(workers.TRANSFER, _extract, folder / "archive", folder / "tree", max_bytes)
        await sandbox.copy_to(folder / "tree", path)
    finally:
        await workers.run(workers.TRANSFER, remove_tree, folder)


async def _pieces(archive: Path, folder: Path) -> AsyncGenerator[bytes, None]:
    try:
        with archive.open("rb") as file:
            while data := await workers.run(workers.TRANSFER, file.read, _CHUNK):
                yield data
    finally:
        await asyncio.shield(workers.run(workers.TRANSFER, remove_tree, folder))


def _write(tree: Path, archive: Path) -> None:
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        if not tree.is_dir() or tree.is_symlink():
            _add(tar, tree.name, tree, tree.lstat())
            return
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _add(tar, ".", tree, os.fstat(fd))
            for found in walk(fd):
                # By the open parent: the whole path may be longer than any that can be opened.
                place = Path(f"/proc/self/fd/{found.parent}", found.name)
                _add(tar, f"./{os.fsdecode(found.path)}", place, found.info)
        finally:
            os.close(fd)


def _add(tar: tarfile.TarFile, name: str, place: Path, info: os.stat_result) -> None:
    """Owners are left out: ids mean nothing outside of the sandbox."""
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(info.st_mode), info.st_mtime
    if stat.S_ISREG(info.st_mode):
        member.size = info.st_size
        with place.open("rb") as content:
            tar.addfile(member, content)
        return
    if stat.S_ISLNK(info.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(place)
    else:
        member.type = tarfile.DIRTYPE
    tar.addfile(member)


def _extract(archive: Path, tree: Path, max_bytes: int) -> None:
    """With the same care as an image of a stranger: nothing in it leads out of the tree."""
    tree.mkdir()
    limits = ImageLimits(total_bytes=max_bytes, file_bytes=max_bytes, entries=_MOST_ITEMS)
    budget, work = Budget(limits), Work()
    try:
        with archive.open("rb") as file, Root(tree) as root, plain(file, limits, work) as reader:
            result = extract(reader, root, budget, work, whiteouts=False, detail="archive")
    except ImageError as error:
        if budget.bytes_used > limits.total_bytes or budget.entries_used > limits.entries:
            raise HTTPException(413, f"the archive holds more than {max_bytes} bytes or {_MOST_ITEMS} files") from error
        raise ValueError(f"the archive cannot be taken: {error.reason}") from error
    if result.devices_skipped:
        raise ValueError("the archive holds what is neither a file, a directory nor a link")
