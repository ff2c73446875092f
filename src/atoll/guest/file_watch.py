"""Watches: changes of files below a directory of a sandbox, as they happen."""

from __future__ import annotations

import enum
import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import ProtocolError
from atoll.guest.file_records import check_relative
from atoll.guest.frames import MAX_PATH, EventKind, Op, decode_text
from atoll.guest.inbox import Inbox

if TYPE_CHECKING:
    from atoll.guest.guest import Guest

_HEAD = struct.Struct("<BBH")


class FileEventKind(enum.StrEnum):
    CREATED = "created"
    MODIFIED = "modified"
    REMOVED = "removed"
    MOVED_FROM = "moved_from"
    MOVED_TO = "moved_to"
    ATTRIBUTES = "attributes"
    OVERFLOW = "overflow"
    """Events were lost because there were too many. List the directory to see its current state."""


_KINDS = dict(enumerate(FileEventKind, start=1))


@dataclass(frozen=True, slots=True)
class FileEvent:
    kind: FileEventKind
    path: str
    """The path relative to the watched directory."""
    is_dir: bool


class AsyncWatch:
    """A watch: `async with files.watch(path) as events: async for event in events: ...`.

    It runs until it is closed or its `async with` block ends.
    """

    def __init__(self, guest: Guest, fields: bytes, path: str) -> None:
        self._guest = guest
        self._fields = fields
        self._path = path
        self._inbox: Inbox | None = None
        self._rest = b""
        self._events: deque[FileEvent] = deque()

    async def __aenter__(self) -> AsyncWatch:
        """Start the watch. All changes made after this returns are reported."""
        if self._inbox is not None:
            return self
        inbox = Inbox(events=(EventKind.READY,))
        inbox.open(await self._guest.connection(), Op.WATCH, self._fields)
        try:
            if not await inbox.event(EventKind.READY):
                raise ProtocolError("the agent ended a watch by itself")
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from None
        except BaseException:
            inbox.close()
            raise
        inbox.stream.live = True
        self._inbox = inbox
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncWatch:
        return self

    async def __anext__(self) -> FileEvent:
        if self._inbox is None:
            await self.__aenter__()
        assert self._inbox is not None
        while not self._events:
            if self._inbox.stream.closed:
                raise StopAsyncIteration
            piece = await self._inbox.take()
            if piece is None:
                raise StopAsyncIteration
            with self._inbox.parsing():
                self._parse(piece[1])
        return self._events.popleft()

    async def aclose(self) -> None:
        """End the watch. An iteration that waits for an event ends too. May be repeated."""
        if self._inbox is not None and not self._inbox.over:
            self._inbox.close()
            self._inbox.finish()

    def _parse(self, data: bytes) -> None:
        data = self._rest + data
        position = 0
        while len(data) - position >= _HEAD.size:
            what, is_dir, length = _HEAD.unpack_from(data, position)
            if what not in _KINDS or is_dir > 1 or length > MAX_PATH:
                raise ProtocolError("the agent sent a malformed watch record")
            stop = position + _HEAD.size + length
            if stop > len(data):
                break
            path = data[position + _HEAD.size : stop]
            if path:
                check_relative(path)
            self._events.append(FileEvent(_KINDS[what], decode_text(path), bool(is_dir)))
            position = stop
        self._rest = data[position:]
