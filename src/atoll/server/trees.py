"""Trees as tar archives. They pass through a directory of the server that exists only for the request."""

from __future__ import annotations

import asyncio
import shutil
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

_CHUNK = 1 << 20
_MOST_ITEMS = 1_000_000


async def pack(sandbox: ManagedSandbox, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The archive, piece by piece. What cannot be read is an error before the first."""
    folder = Path(await workers.run(workers.TRANSFER, tempfile.mkdtemp, prefix="atoll-tree-"))
    archive = folder / "archive"
    try:
        async with sandbox.use():
            await trees.copy_from(
                sandbox._connect, sandbox._path(path), folder / "tree", max_bytes=max_bytes, max_items=_MOST_ITEMS
            )
        await workers.run(workers.TRANSFER, _write, folder / "tree", archive)
    except BaseException:
        await workers.run(workers.TRANSFER, shutil.rmtree, folder, ignore_errors=True)
        raise
    return _pieces(archive, folder)


async def unpack(sandbox: ManagedSandbox, path: str, pieces: AsyncIterator[bytes], max_bytes: int) -> None:
    """Nothing reaches the sandbox before the whole archive was read and understood."""
    folder = Path(await workers.run(workers.TRANSFER, tempfile.mkdtemp, prefix="atoll-tree-"))
    try:
        with (folder / "archive").open("wb") as file:
            async for piece in pieces:
                await workers.run(workers.TRANSFER, file.write, piece)
        await workers.run(workers.TRANSFER, _extract, folder / "archive", folder / "tree", max_bytes)
        await sandbox.copy_to(folder / "tree", path)
    finally:
        await workers.run(workers.TRANSFER, shutil.rmtree, folder, ignore_errors=True)


async def _pieces(archive: Path, folder: Path) -> AsyncGenerator[bytes, None]:
    try:
        with archive.open("rb") as file:
            while data := await workers.run(workers.TRANSFER, file.read, _CHUNK):
                yield data
    finally:
        await asyncio.shield(workers.run(workers.TRANSFER, shutil.rmtree, folder, ignore_errors=True))


def _write(tree: Path, archive: Path) -> None:
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(tree, arcname="." if tree.is_dir() and not tree.is_symlink() else tree.name, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


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
