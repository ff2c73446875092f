"""A separate blocking connection for bulk data, used by a worker thread.

Bulk data does not pass through the event loop, where it would delay everything else. One stream is open at a time. The
agent is trusted no more than on a shared connection: lengths, stream numbers and directions are checked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from atoll.errors import AgentUnreachableError, ProtocolError
from atoll.guest.frames import (
    HEADER,
    MAX_PAYLOAD,
    WINDOW,
    Fields,
    FrameType,
    Op,
    agent_error,
    decode_credit,
    decode_fields,
    encode_credit,
    encode_frame,
    encode_open,
    message_of,
)

_BUFFER = 4 * (HEADER.size + MAX_PAYLOAD)
_SEND_BUFFER = 1 << 20
"""Large enough for all of an upload's credit to be in flight. With less, each side waits for the other more often."""
FILE_CHUNK = MAX_PAYLOAD
_TIMEVAL = struct.Struct("@ll")


_NOT_FROM_FILE = (errno.EIO, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Refused(Exception):  # noqa: N818
    """The agent ended the stream with an error. This is not an OSError, to keep it apart from errors of host files."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class _Frame(NamedTuple):
    kind: int
    payload: memoryview


class BulkConnection:
    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """`timeout_s` is the maximum time without any progress by the agent."""
        self._sock = sock
        self._timeout_s = timeout_s
        self._number = 0
        self._send_credit = 0
        self._window = 0
        self._consumed = 0
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = 0
        self._end = 0
        self.before_reuse: Callable[[], None] = lambda: None
        """Called before the data received so far is overwritten."""
        sock.setblocking(True)
        # Use the kernel's timeout, because Python's costs one more system call for each read and write.
        limit = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    def abort(self) -> None:
        """Make the thread that waits for the agent fail now. Called from another thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def open(self, op: Op, fields: bytes, window: int = WINDOW) -> None:
        self._number += 1
        self._send_credit = WINDOW
        self._window, self._consumed = window, 0
        self._send(memoryview(encode_open(op, self._number, fields, window)))

    def request(self, op: Op, fields: bytes) -> Fields:
        self.open(op, fields)
        return self.result()

    def send_data(self, data: memoryview) -> None:
        while data:
            if self._send_credit == 0:
                self._wait_for_credit()
            piece = data[: min(self._send_credit, MAX_PAYLOAD)]
            self._send_credit -= len(piece)
            self._send(piece, HEADER.pack(len(piece), self._number, FrameType.DATA, 0, 0))
            data = data[len(piece) :]

    def send_file(self, fd: int, size: int) -> int:
        """Send exactly `size` bytes of a file with sendfile(2); zeros replace what is missing or cannot be read.

        Returns the number of bytes that came from the file.
        """
        real = offset = 0
        while offset < size:
            if self._send_credit == 0:
                self._wait_for_credit()
            length = min(size - offset, self._send_credit, FILE_CHUNK)
            self._send_credit -= length
            self._send(memoryview(HEADER.pack(length, self._number, FrameType.DATA, 0, 0)), flags=socket.MSG_MORE)
            real += self._send_part(fd, offset, length)
            offset += length
        return real

    def end(self) -> None:
        self._send(memoryview(encode_frame(FrameType.END, self._number)))

    def receive_data(self) -> memoryview | None:
        """Return the next piece, valid until `before_reuse` is called, or None after the last one. Raises Refused."""
        if self._consumed * 2 >= self._window:
            credit, self._consumed = self._consumed, 0
            self._send(memoryview(encode_credit(self._number, credit)))
        frame = self._next()
        if frame.kind == FrameType.END:
            decode_fields(frame.payload)
            return None
        if frame.kind != FrameType.DATA:
            raise ProtocolError(f"the agent sent a frame of type {frame.kind} instead of data")
        # Data is consumed as it arrives, so an agent that exceeds its credit gains nothing and needs no check.
        self._consumed += len(frame.payload)
        return frame.payload

    def result(self) -> Fields:
        """Return the fields of the END frame of a stream that carries no data in this direction."""
        while (frame := self._next()).kind == FrameType.CREDIT:
            pass
        if frame.kind != FrameType.END:
            raise ProtocolError(f"the agent sent a frame of type {frame.kind} instead of the end")
        return decode_fields(frame.payload)

    def _wait_for_credit(self) -> None:
        frame = self._next()
        if frame.kind != FrameType.CREDIT:
            raise ProtocolError(f"the agent sent a frame of type {frame.kind} in the middle of an upload")
        self._send_credit += decode_credit(frame.payload)

    def _next(self) -> _Frame:
        while True:
            start = self._start + HEADER.size
            if self._end >= start:
                length, number, kind, channel, reserved = HEADER.unpack_from(self._buffer, self._start)
                if length > MAX_PAYLOAD:
                    raise ProtocolError(f"the agent sent a frame of {length} bytes, at most {MAX_PAYLOAD} are allowed")
                if self._end - start >= length:
                    break
            self._receive()
        payload = self._buffer[start : start + length]
        self._start = start + length
        if kind == FrameType.ERROR and number in (0, self._number):
            raise _refusal(number, decode_fields(payload))
        if number != self._number or channel or reserved:
            raise ProtocolError(f"the agent sent a malformed frame, or one for stream {number}, which is not open")
        return _Frame(kind, payload)

    def _receive(self) -> None:
        if len(self._buffer) - self._start < HEADER.size + MAX_PAYLOAD:
            self.before_reuse()
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        try:
            size = self._sock.recv_into(self._buffer[self._end :])
        except OSError as error:
            raise self._lost(error) from error
        if size == 0:
            raise AgentUnreachableError("the agent closed the connection in the middle of a copy")
        self._end += size

    def _send_part(self, fd: int, offset: int, length: int) -> int:
        done = 0
        while done < length:
            try:
                step = os.sendfile(self._sock.fileno(), fd, offset + done, length - done)
            except OSError as error:
                if error.errno not in _NOT_FROM_FILE:
                    raise self._lost(error) from error
                step = self._send_read(fd, offset + done, length - done)
            if step == 0:
                self._send(memoryview(bytes(length - done)))
                break
            done += step
        return done

    def _send_read(self, fd: int, offset: int, length: int) -> int:
        """Send a part of a file on a file system that does not support sendfile(2)."""
        try:
            data = os.pread(fd, length, offset)
        except OSError:
            return 0
        self._send(memoryview(data))
        return len(data)

    def _send(self, data: memoryview, header: bytes = b"", flags: int = 0) -> None:
        try:
            sent = self._sock.sendmsg([header, data], (), flags) - len(header)
            if sent < 0:
                self._sock.sendall(header[sent:])
                sent = 0
            if sent < len(data):
                self._sock.sendall(data[sent:])
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> AgentUnreachableError:
        if isinstance(error, BlockingIOError):
            return AgentUnreachableError(f"the agent made no progress for {self._timeout_s:g} s")
        return AgentUnreachableError(f"the connection to the agent was lost: {error.strerror}")


def _refusal(number: int, fields: Fields) -> ProtocolError | Refused:
    if number == 0:
        return ProtocolError(f"the agent rejected a frame: {message_of(fields)}")
    return Refused(agent_error(fields))
