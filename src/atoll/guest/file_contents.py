"""Reading and writing the contents of files, in pieces."""

from __future__ import annotations

import errno
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable

from atoll.errors import AgentUnreachableError, ProtocolError
from atoll.guest.connection import Answer, Connection
from atoll.guest.frames import WINDOW, EventKind, Op, Tag
from atoll.guest.inbox import Inbox
from atoll.guest.sandbox_paths import GuestPath, naming, text
from atoll.guest.stream import Stream

_READ_WINDOW = 1 << 20

Pieces = AsyncIterable[bytes] | Iterable[bytes]


def too_large(path: GuestPath, limit: int) -> OSError:
    return OSError(errno.EFBIG, f"more than {limit} bytes", text(path))


async def read_pieces(
    connection: Connection, fields: bytes, path: GuestPath, offset: int, length: int | None, limit: int | None
) -> AsyncGenerator[bytes, None]:
    """Yield the content as it arrives. A file whose announced size exceeds `limit` is refused before it is sent."""
    inbox = Inbox(events=(EventKind.FILE,))
    inbox.open(connection, Op.READ, fields, window=_READ_WINDOW)
    received = 0
    try:
        with naming(path), inbox.parsing():
            if not await inbox.event(EventKind.FILE):
                raise ProtocolError("the agent ended a file before it began")
            due = max(0, inbox.events[EventKind.FILE].int(Tag.SIZE) - offset)
            if limit is not None and min(due, length if length is not None else due) > limit:
                raise too_large(path, limit)
            while (piece := await inbox.take()) is not None:
                received += len(piece[1])
                if length is not None and received > length:
                    raise ProtocolError("the agent sent more of a file than requested")
                if limit is not None and received > limit:
                    raise too_large(path, limit)
                yield piece[1]
    finally:
        inbox.close()


async def write_whole(connection: Connection, fields: bytes, path: GuestPath, data: bytes) -> int:
    """Write a small file, sent in one system call. Returns the size that the agent reports."""
    answer = Answer(connection.loop)
    stream = connection.open_stream(Op.WRITE, fields, answer, data=data)
    return await _written(stream, answer, path)


async def write_pieces(connection: Connection, fields: bytes, path: GuestPath, pieces: Pieces) -> int:
    """Write a file from pieces. If `pieces` raises or the call is cancelled, the file keeps its old content."""
    answer = Answer(connection.loop)
    stream = connection.open_stream(Op.WRITE, fields, answer)
    try:
        async for piece in _each(pieces):
            if not await _accepted(stream, piece):
                break
        stream.end()
    except BaseException:
        stream.close()
        raise
    return await _written(stream, answer, path)


def fits(data: bytes) -> bool:
    return len(data) <= WINDOW


async def _written(stream: Stream, answer: Answer, path: GuestPath) -> int:
    try:
        with naming(path):
            return (await answer.future).int(Tag.SIZE, 0)
    finally:
        stream.close()


async def _accepted(stream: Stream, piece: bytes) -> bool:
    """Send a piece and return whether the agent accepts more. If it does not, the answer holds the reason."""
    try:
        await stream.send_data(piece)
    except (BrokenPipeError, AgentUnreachableError):
        return False
    return True


async def _each(pieces: Pieces) -> AsyncIterator[bytes]:
    if isinstance(pieces, AsyncIterable):
        async for piece in pieces:
            yield piece
    else:
        for piece in pieces:
            yield piece
