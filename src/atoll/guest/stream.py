"""One stream of a connection: one request and its answer, with flow control in both directions."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Protocol

from atoll.errors import AgentUnreachableError, ProtocolError
from atoll.guest.frames import HEADER, WINDOW, Fields, FrameType, Verb, encode_credit, encode_frame, encode_u16
from atoll.waiting import EventSignal

if TYPE_CHECKING:
    from atoll.guest.connection import Connection

_CHUNK = 64 * 1024
"""The maximum size of a DATA frame, small enough that one stream delays the frames of another only by microseconds."""


class StreamHandler(Protocol):
    """The receiver of one stream's frames, called directly by the reader of the connection.

    The methods must not block. `data` is valid only during the call; copy it to keep it. A `ProtocolError` raised here
    fails the whole connection. No method is called after `on_end` or `on_error`, or after this side closed the stream.
    """

    def on_data(self, channel: int, data: memoryview) -> None: ...

    def on_event(self, kind: int, fields: Fields) -> None: ...

    def on_end(self, fields: Fields) -> None: ...

    def on_error(self, error: Exception) -> None: ...


class Stream:
    """The sending side of a stream, made by `Connection.open_stream`. Received frames go to its handler."""

    __slots__ = (
        "_connection",
        "_consumed",
        "_sendable",
        "closed",
        "ended",
        "handler",
        "live",
        "number",
        "receive_credit",
        "send_credit",
        "window",
        "write_ended",
    )

    def __init__(self, connection: Connection, number: int, handler: StreamHandler, window: int) -> None:
        self._connection = connection
        self.number = number
        self.handler = handler
        self.window = max(window, WINDOW)
        self.receive_credit = self.window
        """How many more bytes of DATA the agent may send."""
        self.send_credit = WINDOW
        self.ended = False
        """Whether the agent has sent the last frame, or the connection is lost."""
        self.closed = False
        """Whether this side has closed the stream and ignores further frames."""
        self.write_ended = False
        self.live = False
        """Whether the stream may stay silent. All others wait for an answer, so the connection checks after a silence
        that one can still come."""
        self._consumed = 0
        self._sendable = EventSignal()

    async def send_data(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of the data, as fast as the agent accepts it. BrokenPipeError if the agent has ended the stream."""
        view = memoryview(data)
        while view:
            self._check_sendable()
            if self.send_credit == 0:
                await self._sendable.wait()
            elif self._connection.congested:
                await self._connection.drained.wait()
            else:
                chunk = view[: min(self.send_credit, _CHUNK)]
                self.send_credit -= len(chunk)
                self._connection.send(HEADER.pack(len(chunk), self.number, FrameType.DATA, 0, 0) + chunk)
                view = view[len(chunk) :]

    async def alive(self) -> None:
        """Return if the agent was heard recently, or once it answers. Raises the reason why it cannot answer."""
        await self._connection.alive()

    def end(self) -> None:
        """End the data of this side. May be repeated."""
        if not (self.write_ended or self.closed or self.ended):
            self.write_ended = True
            self._connection.send(encode_frame(FrameType.END, self.number))

    def control(self, verb: Verb, fields: bytes) -> None:
        self._check_sendable(ended_by_us=False)
        self._connection.send(encode_frame(FrameType.CONTROL, self.number, encode_u16(verb) + fields))

    def close(self) -> None:
        """Close the stream. The connection, not the caller, waits for the agent's last frame. May be repeated."""
        if not (self.closed or self.ended):
            self.closed = True
            self._connection.send(encode_frame(FrameType.CLOSE, self.number))
            self.wake()

    def grant(self, size: int) -> None:
        """Record that `size` bytes were consumed. Credit is sent once half of the window was consumed."""
        self._consumed += size
        if self._consumed * 2 >= self.window and not (self.closed or self.ended):
            self.receive_credit += self._consumed
            credit, self._consumed = self._consumed, 0
            self._connection.send(encode_credit(self.number, credit))

    def refuse(self, error: ProtocolError) -> None:
        """Fail the whole connection because data of this stream violated the protocol."""
        self._connection.fail(error)

    def wake(self) -> None:
        """Wake the tasks that wait to send."""
        self._sendable.notify()

    def _check_sendable(self, ended_by_us: bool = True) -> None:
        if self._connection.closed:
            raise AgentUnreachableError("the connection to the agent was lost")
        if self.ended or self.closed or (ended_by_us and self.write_ended):
            raise BrokenPipeError(errno.EPIPE, "the stream has ended")
