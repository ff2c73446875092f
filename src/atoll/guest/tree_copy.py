"""Copying files and trees between the host and a sandbox, at about the speed of `cp`.

A copy runs in a worker thread and uses a separate connection. Cancelling stops the thread and waits for it; an
incomplete file is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from atoll import workers
from atoll.cancellation import finish_or_stop
from atoll.errors import ProtocolError
from atoll.guest.bulk import BulkConnection, Refused
from atoll.guest.connection import Connect, dial
from atoll.guest.file_records import DIRECTORY
from atoll.guest.frames import Op, Tag, encode_fields
from atoll.guest.pack import TreePacker
from atoll.guest.sandbox_paths import Failures, PartialCopyError, check_path
from atoll.guest.unpack import TreeUnpacker

__all__ = ["PartialCopyError", "copy_from", "copy_to"]

_CONNECT_TIMEOUT_S = 30.0
_DOWNLOAD_WINDOW = 4 << 20
_FOLLOW = _PARENTS = 1


async def copy_to(
    connect: Connect, src: str | Path, dst: str, work_dir: str | None = None, *, timeout_s: float = 60.0
) -> int:
    """Copy a file or directory of the host into the sandbox; returns the number of items.

    A directory's content goes into `dst`; a file becomes `dst`, or goes into it if it is a directory or ends with '/'.
    Symbolic links below `src` are copied as links. Modes (without set-uid) and times are kept. Files that cannot be
    read, and anything that is not a file, directory or link, are left out and reported at the end by PartialCopyError.
    `timeout_s` is the maximum time without any progress.
    """
    check_path(dst)
    return await _in_thread(connect, timeout_s, lambda bulk: _upload(bulk, os.fspath(src), dst, work_dir))


async def copy_from(
    connect: Connect,
    src: str,
    dst: str | Path,
    work_dir: str | None = None,
    *,
    timeout_s: float = 60.0,
    max_bytes: int | None = None,
    max_items: int | None = None,
    room: Callable[[int], None] | None = None,
) -> int:
    """Copy a file or directory of the sandbox to the host; returns the number of items.

    Destinations are as for `copy_to`; missing parents are created. SandboxResourceError beyond a limit, ProtocolError
    for anything that would reach outside of `dst`. `room` is called with the number of bytes that each piece uses on
    disk, without the holes of sparse files, and may raise.
    """
    check_path(src)
    destination = os.fspath(dst)
    return await _in_thread(
        connect, timeout_s, lambda bulk: _download(bulk, src, destination, work_dir, max_bytes, max_items, room)
    )


async def _in_thread(connect: Connect, timeout_s: float, work: Callable[[BulkConnection], int]) -> int:
    bulk = BulkConnection(await dial(connect, _CONNECT_TIMEOUT_S), timeout_s)
    try:
        return await finish_or_stop(workers.run(workers.TRANSFER, work, bulk), bulk.abort)
    finally:
        bulk.close()


def _upload(bulk: BulkConnection, src: str, dst: str, work_dir: str | None) -> int:
    status = os.stat(src)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.EINVAL, "neither a file nor a directory", src)
    if stat.S_ISREG(status.st_mode) and _is_directory(bulk, dst, work_dir):
        dst = str(PurePosixPath(dst) / os.path.basename(os.path.abspath(src)))
    failures = Failures()
    packer = TreePacker(bulk, failures)
    with _refused(dst):
        bulk.open(Op.PUT_TREE, _fields(dst, work_dir, _PARENTS))
        packer.pack(os.path.realpath(src))
        bulk.end()
        if bulk.result().int(Tag.SIZE) != packer.items:
            raise ProtocolError("the agent did not make as many files as it was sent")
    failures.raise_if_any()
    return packer.items


def _download(
    bulk: BulkConnection,
    src: str,
    destination: str,
    work_dir: str | None,
    max_bytes: int | None,
    max_items: int | None,
    room: Callable[[int], None] | None,
) -> int:
    failures = Failures()
    unpacker = TreeUnpacker(src, destination, failures, max_bytes, max_items, room)
    bulk.before_reuse = unpacker.flush
    try:
        with _refused(src):
            bulk.open(Op.GET_TREE, _fields(src, work_dir), _DOWNLOAD_WINDOW)
            while (data := bulk.receive_data()) is not None:
                unpacker.feed(data)
            unpacker.finish()
    finally:
        unpacker.close()
    failures.raise_if_any()
    return unpacker.items


@contextlib.contextmanager
def _refused(path: str) -> Iterator[None]:
    """Convert the agent's errors to the built-in OSErrors, with the requested path."""
    try:
        yield
    except Refused as refusal:
        raise OSError(refusal.error.errno, refusal.error.strerror, path) from None


def _is_directory(bulk: BulkConnection, path: str, work_dir: str | None) -> bool:
    if path.endswith("/"):
        return True
    try:
        return bulk.request(Op.STAT, _fields(path, work_dir, _FOLLOW)).bytes(Tag.KIND) == bytes([DIRECTORY])
    except Refused:
        return False


def _fields(path: str, work_dir: str | None, flags: int = 0) -> bytes:
    where = [] if work_dir is None else [(Tag.CWD, work_dir)]
    return encode_fields([(Tag.PATH, path), *where, (Tag.FLAGS, flags)])
