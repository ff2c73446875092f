"""Putting items with owners into a sandbox, as a build copies: paths are resolved inside, by the agent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from atoll import workers
from atoll.cancellation import finish_or_stop
from atoll.errors import ProtocolError
from atoll.guest.bulk import BulkConnection, Refused
from atoll.guest.connection import Connect, dial
from atoll.guest.file_records import FILE, encode_record
from atoll.guest.frames import Op, Tag, encode_fields
from atoll.guest.pack import TreePacker
from atoll.guest.sandbox_paths import Failures, check_path

_CONNECT_TIMEOUT_S = 30.0
_PARENTS, _OWNED, _REPLACE = 1, 2, 4

Owner = tuple[int, int]
"""A user id and a group id, as they are seen inside."""


class PutItem(NamedTuple):
    """A file, directory or link to make. The first item of a tree has the path b"" and is the target itself."""

    kind: int
    path: bytes
    mode: int
    owner: Owner
    size: int
    mtime_ns: int
    target: bytes = b""
    """Of a link; of a hard link, the path of the item that it is another name of."""
    content: bytes | Callable[[], int] = b""
    """The content of a file, or a function that opens it and returns the descriptor."""


async def put_items(
    connect: Connect,
    path: str,
    items: Iterable[PutItem],
    *,
    owner: Owner = (0, 0),
    replace: bool = False,
    timeout_s: float = 60.0,
) -> int:
    """Make these items at a path inside, and return their number. Missing parents of the path belong to `owner`.

    An existing directory at the path stays as it is; those below it get the modes and owners of their items. A file
    replaces a file. Anything else that is in the way is an error or, with `replace`, removed if it is no directory.
    `items` is iterated in a worker thread. `timeout_s` is the maximum time without any progress. Raises OSError; a file
    that changes while it is read is one.
    """
    check_path(path)
    bulk = BulkConnection(await dial(connect, _CONNECT_TIMEOUT_S), timeout_s)

    def work() -> int:
        with _refused():
            return _put(bulk, path, items, owner, replace)

    try:
        return await finish_or_stop(workers.run(workers.TRANSFER, work), bulk.abort)
    finally:
        bulk.close()


def _put(bulk: BulkConnection, path: str, items: Iterable[PutItem], owner: Owner, replace: bool) -> int:
    failures = Failures()
    packer = TreePacker(bulk, failures)
    flags = _PARENTS | _OWNED | (_REPLACE if replace else 0)
    wanted: list[tuple[Tag, int | bytes | str]] = [
        (Tag.PATH, path),
        (Tag.FLAGS, flags),
        (Tag.UID, owner[0]),
        (Tag.GID, owner[1]),
    ]
    bulk.open(Op.PUT_TREE, encode_fields(wanted))
    for item in items:
        _send(packer, item)
    packer.flush()
    bulk.end()
    if bulk.result().int(Tag.SIZE) != packer.items:
        raise ProtocolError("the agent did not make as many files as it was sent")
    failures.raise_if_any()
    return packer.items


def _send(packer: TreePacker, item: PutItem) -> None:
    record = encode_record(item.kind, item.path, item.mode, item.size, item.mtime_ns, item.target, owner=item.owner)
    if item.kind != FILE:
        packer.put(record)
    elif isinstance(item.content, bytes):
        packer.put(record)
        packer.put_bytes(item.content)
    else:
        fd = item.content()
        try:
            packer.put(record)
            packer.put_content(fd, item.path, item.size)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Convert the agent's errors to the built-in OSErrors."""
    try:
        yield
    except Refused as refusal:
        raise refusal.error from None
