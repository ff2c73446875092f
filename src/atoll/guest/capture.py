"""The part of a command's output that is kept: its beginning and its end."""

from __future__ import annotations

import io

from atoll.buffers import reservation

_SLACK = 4096
_STEP_BYTES = 1 << 20


class Capture:
    """Captured output: all of it up to `limit` bytes, otherwise its first and last `limit / 2` bytes.

    If the memory reservation of the current request is exhausted, the limit shrinks to the amount already kept.
    """

    __slots__ = ("_head", "_head_limit", "_reservation", "_tail", "_tail_limit", "missing", "total")

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._reservation = reservation.get()
        self.total = 0
        """How many bytes were written, kept or not."""
        self.missing = 0
        """How many bytes at the beginning were lost before they could be captured."""

    def add(self, data: memoryview) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            granted = self._granted(min(room, len(data)))
            if granted < min(room, len(data)):
                self._head_limit, self._tail_limit = len(self._head) + granted, 0
            self._head += data[:granted]
            data = data[granted:]
        if data and self._tail_limit:
            more = min(len(data), self._tail_limit - len(self._tail))
            if more > 0 and (granted := self._granted(more)) < more:
                self._tail_limit = len(self._tail) + granted
            self._keep_last(data)

    def _keep_last(self, data: memoryview) -> None:
        if not self._tail_limit:
            return
        self._tail += data[-self._tail_limit :]
        # Trim only occasionally, so that a flood of output does not copy each byte many times.
        if len(self._tail) > self._tail_limit + max(self._tail_limit // 4, min(self._tail_limit, _SLACK)):
            del self._tail[: -self._tail_limit]

    def _granted(self, size: int) -> int:
        return size if self._reservation is None else self._reservation.take(size)

    def miss(self, size: int) -> None:
        self.missing += size
        self.total += size

    @property
    def kept(self) -> int:
        return len(self._head) + len(self._tail)

    @property
    def dropped(self) -> int:
        return self.total - len(self._head) - min(len(self._tail), self._tail_limit)

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
        _copy(self._head, whole)
        if between := self.dropped - self.missing:
            whole.write(_marker(between))
        _copy(memoryview(self._tail)[max(0, len(self._tail) - self._tail_limit) :], whole)
        return whole.getvalue()


def _copy(data: bytearray | memoryview, whole: io.BytesIO) -> None:
    with memoryview(data) as view:
        for offset in range(0, len(view), _STEP_BYTES):
            whole.write(view[offset : offset + _STEP_BYTES])


def _marker(size: int) -> bytes:
    return b"\n... [%d bytes left out] ...\n" % size
