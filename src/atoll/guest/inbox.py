"""Queued data of a stream. The agent may send more only when queued data has been taken."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator

from atoll.errors import ProtocolError
from atoll.guest.connection import Connection
from atoll.guest.frames import WINDOW, Fields, Op
from atoll.guest.stream import Stream
from atoll.waiting import EventSignal

_COALESCE = 16 * 1024


class Inbox:
    """A stream handler with a queue that holds at most one window of data."""

    def __init__(self, channels: Collection[int] = (0,), events: Collection[int] = ()) -> None:
        self.stream: Stream
        self.end: Fields | None = None
        self.error: Exception | None = None
        self.events: dict[int, Fields] = {}
        self.taken = [0, 0, 0, 0]
        """How many bytes of each channel were taken."""
        self.eof = False
        """Whether no more data will come, even if the stream is still open."""
        self.discarding = False
        self._channels = channels
        self._expected = events
        self._queue: deque[tuple[int, bytearray]] = deque()
        self._changed = EventSignal()

    def open(
        self, connection: Connection, op: Op, fields: bytes, *, window: int = WINDOW, data: bytes | None = None
    ) -> Stream:
        self.stream = connection.open_stream(op, fields, self, window=window, data=data)
        return self.stream

    @property
    def over(self) -> bool:
        """Whether the agent has sent its last frame, or the connection was lost."""
        return self.end is not None or self.error is not None

    async def take(self) -> tuple[int, bytes] | None:
        """Return the channel and data of the next piece, or None at the end. The stream's error is raised after all
        data that came before it."""
        while not self._queue:
            if self.error is not None:
                raise self.error
            if self.eof or self.end is not None:
                return None
            await self._changed.wait()
        channel, data = self._queue.popleft()
        self._consume(channel, len(data))
        return channel, bytes(data)

    async def finished(self) -> Fields:
        """Wait for the end of the stream and return the fields of its END frame."""
        while True:
            if self.error is not None:
                raise self.error
            if self.end is not None:
                return self.end
            await self._changed.wait()

    async def event(self, *kinds: int) -> bool:
        """Wait for one of these events. Returns False if the stream ended without one."""
        while not any(kind in self.events for kind in kinds):
            if self.error is not None:
                raise self.error
            if self.end is not None:
                return False
            await self._changed.wait()
        return True

    def discard(self, on: bool) -> None:
        """Discard queued and future data, or stop doing so."""
        self.discarding = on
        while on and self._queue:
            channel, data = self._queue.popleft()
            self._consume(channel, len(data))

    def close(self) -> None:
        self.stream.close()

    def finish(self) -> None:
        """End the waits of this side as if the stream had ended. Queued data can still be taken."""
        if not self.over:
            self.on_end(Fields({}))

    @contextlib.contextmanager
    def parsing(self) -> Iterator[None]:
        """Wrap the parsing of data that was taken already: a ProtocolError still fails the connection."""
        try:
            yield
        except ProtocolError as error:
            self.stream.refuse(error)
            raise

    def on_data(self, channel: int, data: memoryview) -> None:
        if channel not in self._channels or self.eof:
            raise ProtocolError(f"the agent sent unexpected data on channel {channel}")
        if self.discarding:
            self._consume(channel, len(data))
            return
        if not data:
            return
        # Join small pieces: a flood of tiny frames must not cost a hundred bytes of memory for each byte.
        if self._queue and self._queue[-1][0] == channel and len(self._queue[-1][1]) < _COALESCE:
            self._queue[-1][1].extend(data)
        else:
            self._queue.append((channel, bytearray(data)))
        self._changed.notify()

    def on_event(self, kind: int, fields: Fields) -> None:
        if kind not in self._expected or kind in self.events:
            raise ProtocolError(f"the agent sent the unexpected event {kind}")
        self.events[kind] = fields
        self._changed.notify()

    def on_end(self, fields: Fields) -> None:
        self.end = fields
        self._changed.notify()

    def on_error(self, error: Exception) -> None:
        self.error = error
        self._changed.notify()

    def _consume(self, channel: int, size: int) -> None:
        self.taken[channel] += size
        self.stream.grant(size)
