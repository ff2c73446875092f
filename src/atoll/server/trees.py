"""Trees as tar archives. They pass through a directory of the server that exists only for the request."""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.exceptions import HTTPException

from atoll.guest import trees
from atoll.manager import ManagedSandbox

_CHUNK = 1 << 20
_MOST_ITEMS = 1_000_000


async def pack(sandbox: ManagedSandbox, path: str, max_bytes: int) -> AsyncIterator[bytes]:
    """The archive, piece by piece. What cannot be read is an error before the first."""
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="atoll-tree-"))
    archive = folder / "archive"
    try:
        async with sandbox.use():
            await trees.copy_from(
                sandbox._connect, sandbox._path(path), folder / "tree", max_bytes=max_bytes, max_items=_MOST_ITEMS
            )
        await asyncio.to_thread(_write, folder / "tree", archive)
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise
    return _pieces(archive, folder)


async def unpack(sandbox: ManagedSandbox, path: str, pieces: AsyncIterator[bytes], max_bytes: int) -> None:
    """Nothing reaches the sandbox before the whole archive was read and understood."""
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="atoll-tree-"))
    try:
        with (folder / "archive").open("wb") as file:
            async for piece in pieces:
                await asyncio.to_thread(file.write, piece)
        await asyncio.to_thread(_extract, folder / "archive", folder / "tree", max_bytes)
        await sandbox.copy_to(folder / "tree", path)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _pieces(archive: Path, folder: Path) -> AsyncIterator[bytes]:
    try:
        with archive.open("rb") as file:
            while data := await asyncio.to_thread(file.read, _CHUNK):
                yield data
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


def _write(tree: Path, archive: Path) -> None:
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(tree, arcname="." if tree.is_dir() and not tree.is_symlink() else tree.name, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _extract(archive: Path, tree: Path, max_bytes: int) -> None:
    tree.mkdir()
    try:
        with tarfile.open(archive, "r:*") as tar:
            total = 0
            for count, member in enumerate(tar, 1):
                total += member.size
                if total > max_bytes or count > _MOST_ITEMS:
                    raise HTTPException(413, f"the archive holds more than {max_bytes} bytes or {_MOST_ITEMS} files")
                if not (member.isreg() or member.isdir() or member.issym()):
                    raise ValueError(f"{member.name[:200]!r} is neither a file, a directory nor a link")
                _extract_member(tar, member, tree)
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, tarfile.TarError):
            raise
        raise ValueError(f"the archive cannot be read: {error}") from error


def _extract_member(tar: tarfile.TarFile, member: tarfile.TarInfo, tree: Path) -> None:
    """Files and directories as the standard library's filter lets them; links as they are, since they are only ever
    followed inside the sandbox. For the same reason nothing is written through a link that came before."""
    if not member.issym():
        tar.extract(member, tree, filter="data")
        return
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if ".." in parts or not parts or member.name.startswith("/"):
        raise ValueError(f"{member.name[:200]!r} leaves the tree")
    place = tree
    for part in parts[:-1]:
        place /= part
        if place.is_symlink():
            raise ValueError(f"{member.name[:200]!r} goes through a link")
        place.mkdir(exist_ok=True)
    target = place / parts[-1]
    if target.is_symlink() or target.is_file():
        target.unlink()
    os.symlink(member.linkname, target)
