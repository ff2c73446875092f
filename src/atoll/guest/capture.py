"""The part of a command's output that is kept: its beginning and its end."""

from __future__ import annotations

import io
from collections import deque

from atoll.buffers import reservation

_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 4096, 1 << 20


class Capture:
    """Captured output: all of it up to `limit` bytes, otherwise its first and last `limit / 2` bytes.

    If the memory reservation of the current request is exhausted, the limit shrinks to the amount already kept.
    """

    __slots__ = ("_head", "_head_limit", "_reservation", "_tail", "_tail_limit", "missing", "total")

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = _Pieces(_MAX_PIECE_BYTES)
        self._tail = _Pieces(min(_MAX_PIECE_BYTES, max(limit // 8, min(limit // 2, _MIN_PIECE_BYTES), 1)))
        self._reservation = reservation.get()
        self.total = 0
        """How many bytes were written, kept or not."""
        self.missing = 0
        """How many bytes at the beginning were lost before they could be captured."""

    def add(self, data: memoryview) -> None:
        self.total += len(data)
        room = self._head_limit - self._head.size
        if room > 0:
            granted = self._granted(min(room, len(data)))
            if granted < min(room, len(data)):
                self._head_limit, self._tail_limit = self._head.size + granted, 0
            self._head.add(data[:granted])
            data = data[granted:]
        if data and self._tail_limit:
            more = min(len(data), self._tail_limit - self._tail.size)
            if more > 0 and (granted := self._granted(more)) < more:
                self._tail_limit = self._tail.size + granted
            if self._tail_limit:
                self._tail.add(data[-self._tail_limit :])
                self._tail.forget_beginning(self._tail_limit)

    def _granted(self, size: int) -> int:
        return size if self._reservation is None else self._reservation.take(size)

    def miss(self, size: int) -> None:
        self.missing += size
        self.total += size

    @property
    def kept(self) -> int:
        return self._head.size + self._tail.size

    @property
    def dropped(self) -> int:
        return self.total - self._head.size - min(self._tail.size, self._tail_limit)

    @property
    def truncated(self) -> bool:
        return self.dropped > 0

    def value(self) -> bytes:
        """Return the output as one string of bytes, with a marker in place of what was left out.

        In a thread, long outputs do not hold up other threads: they are copied in steps, between which Python switches.
        """
        whole = io.BytesIO()
        if self.missing:
            whole.write(_marker(self.missing))
        self._head.copy(whole)
        if between := self.dropped - self.missing:
            whole.write(_marker(between))
        self._tail.copy(whole, self._tail_limit)
        return whole.getvalue()


class _Pieces:
    """Bytes in pieces of a bounded size, so that adding to many bytes or forgetting them never moves the others."""

    __slots__ = ("_most", "_pieces", "size")

    def __init__(self, most: int) -> None:
        self._most = most
        self._pieces: deque[bytearray] = deque()
        self.size = 0

    def add(self, data: memoryview) -> None:
        self.size += len(data)
        while data:
            if not self._pieces or len(self._pieces[-1]) >= self._most:
                self._pieces.append(bytearray())
            last = self._pieces[-1]
            room = self._most - len(last)
            last += data[:room]
            data = data[room:]

    def forget_beginning(self, limit: int) -> None:
        """Drop what is not needed for the last `limit` bytes, as far as it is whole pieces."""
        while self._pieces and self.size - len(self._pieces[0]) >= limit:
            self.size -= len(self._pieces.popleft())

    def copy(self, whole: io.BytesIO, limit: int | None = None) -> None:
        """Write the bytes, or only the last `limit`, piece by piece."""
        skipped = 0 if limit is None else max(0, self.size - limit)
        for piece in self._pieces:
            with memoryview(piece) as view:
                whole.write(view[min(skipped, len(view)) :])
            skipped = max(0, skipped - len(piece))


def _marker(size: int) -> bytes:
    return b"\n... [%d bytes left out] ...\n" % size
