"""What is kept of a command's output: its beginning and its end."""

from __future__ import annotations


class Capture:
    """Keeps all of it up to `limit` bytes; beyond that the first and the last half of the limit."""

    __slots__ = ("_head", "_head_limit", "_tail", "_tail_limit", "missing", "total")

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0
        """Bytes that were written, kept or not."""
        self.missing = 0
        """Bytes at the beginning that were lost before they could be captured."""

    def add(self, data: memoryview) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data[-self._tail_limit :] if self._tail_limit else b""
            # Cut only now and then, so that a flood costs one copy of each byte and not many.
            if len(self._tail) > 2 * self._tail_limit:
                del self._tail[: -self._tail_limit]

    def miss(self, size: int) -> None:
        self.missing += size
        self.total += size

    @property
    def dropped(self) -> int:
        return self.total - len(self._head) - min(len(self._tail), self._tail_limit)

    @property
    def truncated(self) -> bool:
        return self.dropped > 0

    def value(self) -> bytes:
        tail = self._tail[max(0, len(self._tail) - self._tail_limit) :]
        parts = [bytes(self._head), bytes(tail)]
        if between := self.dropped - self.missing:
            parts.insert(1, _marker(between))
        if self.missing:
            parts.insert(0, _marker(self.missing))
        return b"".join(parts)


def _marker(size: int) -> bytes:
    return b"\n... [%d bytes left out] ...\n" % size
