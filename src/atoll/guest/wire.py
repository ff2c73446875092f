"""Frames in and out of one socket, on one event loop.

The socket is watched with `add_reader`. Data is received into one buffer, cut into frames in place and delivered by a
direct call, without a task, a queue or a copy. The buffer starts small, because most connections carry little data, and
grows to the size of two frames when it is first filled. Writes go to the socket immediately; only data that the kernel
does not accept is kept. asyncio's transports are not used because a connection must also be closable from another event
loop than its own, and after that loop is gone, which a transport cannot do cleanly.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from atoll.errors import AgentError, AgentUnreachableError, ProtocolError
from atoll.guest.frames import HEADER, MAX_PAYLOAD
from atoll.waiting import EventSignal

_BUFFER = 2 * (HEADER.size + MAX_PAYLOAD)
_FIRST_BUFFER = 4096
_MAX_BACKLOG = 64 << 20
_FRAMES_AT_ONCE = 1024
"""The maximum number of frames that are handled before other tasks of the event loop get a turn."""

OnFrame = Callable[[int, int, int, int, memoryview], None]
"""Receives stream, type, channel, reserved and payload, valid only during the call. Raises AgentError to refuse."""


class Wire:
    """One socket that carries frames. `on_lost` is called exactly once, with the reason, unless `close` comes first."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_frame: OnFrame,
        on_lost: Callable[[AgentError], None],
    ) -> None:
        self.closed = False
        self.heard = loop.time()
        """When the agent last sent anything, in the event loop's time."""
        self.drained = EventSignal()
        self._sock = sock
        self._loop = loop
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = memoryview(bytearray(_FIRST_BUFFER))
        self._start = 0
        self._end = 0
        self._backlog = bytearray()
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._on_readable)

    @property
    def congested(self) -> bool:
        """Whether data is waiting to be sent because the agent reads too slowly."""
        return bool(self._backlog)

    def send(self, frames: bytes) -> None:
        """Send complete frames. This never raises: a lost connection is reported to `on_lost`."""
        if self.closed:
            return
        if self._backlog:
            self._backlog += frames
            if len(self._backlog) > _MAX_BACKLOG:
                self._lose("the agent does not read what is sent to it")
            return
        try:
            sent = self._sock.send(frames)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._lose(f"the connection to the agent was lost: {error.strerror}")
            return
        if sent < len(frames):
            self._backlog += memoryview(frames)[sent:]
            self._loop.add_writer(self._sock.fileno(), self._on_writable)

    def close(self) -> None:
        """Close the socket. This may be called from any event loop of the same thread, after the wire's own loop is
        closed, and repeatedly."""
        if self.closed:
            return
        self.closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self.drained.notify()
        self._sock.close()
        self._backlog = bytearray()

    def _lose(self, reason: str) -> None:
        self._on_lost(AgentUnreachableError(reason))

    def _on_writable(self) -> None:
        try:
            sent = self._sock.send(self._backlog)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(f"the connection to the agent was lost: {error.strerror}")
            return
        del self._backlog[:sent]
        if not self._backlog:
            self._loop.remove_writer(self._sock.fileno())
            self.drained.notify()

    def _on_readable(self) -> None:
        try:
            size = self._sock.recv_into(self._buffer[self._end :])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(f"the connection to the agent was lost: {error.strerror}")
            return
        if size == 0:
            self._lose("the agent closed the connection")
            return
        self.heard = self._loop.time()
        self._end += size
        if self._end == len(self._buffer) < _BUFFER:
            self._grow()
        self._deliver()

    def _grow(self) -> None:
        larger = memoryview(bytearray(_BUFFER))
        larger[: self._end] = self._buffer[: self._end]
        self._buffer = larger

    def _deliver(self) -> None:
        try:
            unfinished = self._deliver_frames()
        except AgentError as error:
            self._on_lost(error)
            return
        if unfinished and not self.closed:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_soon(self._deliver_rest)

    def _deliver_rest(self) -> None:
        if not self.closed:
            self._loop.add_reader(self._sock.fileno(), self._on_readable)
            self._deliver()

    def _deliver_frames(self) -> bool:
        """Deliver every complete frame. Returns True if it stopped early, to let other tasks run."""
        buffer, position, end = self._buffer, self._start, self._end
        for _ in range(_FRAMES_AT_ONCE):
            if end - position < HEADER.size:
                break
            length, number, kind, channel, reserved = HEADER.unpack_from(buffer, position)
            if length > MAX_PAYLOAD:
                raise ProtocolError(f"the agent sent a frame of {length} bytes, at most {MAX_PAYLOAD} are allowed")
            payload = position + HEADER.size
            if end - payload < length:
                break
            position = payload + length
            self._on_frame(number, kind, channel, reserved, buffer[payload:position])
            if self.closed:
                return False
        else:
            self._start = position
            return True
        self._keep_rest(position)
        return False

    def _keep_rest(self, position: int) -> None:
        """Make room in the buffer for the rest of the frame that begins at `position`."""
        if position == self._end:
            self._start = self._end = 0
        elif len(self._buffer) - position < HEADER.size + MAX_PAYLOAD:
            rest = bytes(self._buffer[position : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        else:
            self._start = position
