"""One followed process: iterate over its output, send input and signals, wait for its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from atoll.errors import ProtocolError
from atoll.guest.connection import Connection
from atoll.guest.frames import EventKind, Fields, Op, Tag, Verb, encode_fields
from atoll.guest.inbox import Inbox
from atoll.model import Cause

_CAUSES = {1: Cause.EXIT, 2: Cause.SIGNAL, 3: Cause.TIMEOUT, 4: Cause.KILLED, 5: Cause.LOST}
_OUTPUTS = (1, 2, 3)
_OFFSETS = (Tag.OFFSET_1, Tag.OFFSET_2, Tag.OFFSET_3)


class OutputPiece(NamedTuple):
    channel: int
    """1 is standard output, 2 standard error, 3 status."""
    data: bytes


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process ended."""

    cause: Cause
    exit_code: int | None
    signal: int | None
    ends: tuple[int, int, int]
    """How many bytes were written to each channel in total."""
    duration_s: float
    cpu_s: float
    max_rss_bytes: int
    pid: int

    @classmethod
    def decode(cls, fields: Fields) -> ProcessExit:
        cause = _CAUSES.get(fields.int(Tag.CAUSE))
        exit_code = fields.int(Tag.EXIT_CODE) if Tag.EXIT_CODE in fields else None
        signal = fields.int(Tag.TERM_SIGNAL) if Tag.TERM_SIGNAL in fields else None
        if cause is None or (exit_code or 0) > 255 or (signal or 0) > 127:
            raise ProtocolError("the agent reported an impossible end of a process")
        return cls(
            cause=cause,
            exit_code=exit_code,
            signal=signal,
            ends=(fields.int(Tag.END_1, 0), fields.int(Tag.END_2, 0), fields.int(Tag.END_3, 0)),
            duration_s=fields.int(Tag.DURATION_NS, 0) / 1e9,
            cpu_s=fields.int(Tag.CPU_NS, 0) / 1e9,
            max_rss_bytes=fields.int(Tag.MAX_RSS_BYTES, 0),
            pid=fields.int(Tag.PID, 0),
        )


def dropped_at_attach(fields: Fields, asked: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return how many bytes of each channel are missing between the requested offset and the first available byte."""
    gaps = [fields.int(tag, 0) - offset for tag, offset in zip(_OFFSETS, asked, strict=True)]
    if min(gaps) < 0:
        raise ProtocolError("the agent starts before the requested offset")
    return gaps[0], gaps[1], gaps[2]


class FollowedProcess:
    """A process to iterate over for its output, which the agent sends only as fast as the consumer reads.

    If the connection is lost, iteration and `wait` raise AgentUnreachableError; the process continues, and attaching
    with `offsets` continues its output. The iteration may be left early; `wait` then discards the rest.
    """

    def __init__(self, inbox: Inbox, offsets: tuple[int, int, int] = (0, 0, 0)) -> None:
        self.dropped = 0
        """How many bytes of output had already been discarded when this object attached."""
        self.pid = 0
        self.detached = False
        self._inbox = inbox
        self._asked = offsets
        self._first = offsets
        self._waiters = 0
        self._readers = 0

    @classmethod
    def open(
        cls, connection: Connection, op: Op, fields: bytes, offsets: tuple[int, int, int] = (0, 0, 0)
    ) -> FollowedProcess:
        inbox = Inbox(channels=_OUTPUTS, events=(EventKind.STARTED, EventKind.ATTACHED))
        inbox.open(connection, op, fields)
        return cls(inbox, offsets)

    async def ready(self) -> None:
        """Wait until the agent has reported that the process runs or has ended."""
        await self._inbox.event(EventKind.STARTED, EventKind.ATTACHED)
        if (attached := self._inbox.events.get(EventKind.ATTACHED)) is not None:
            with self._inbox.parsing():
                gaps = dropped_at_attach(attached, self._asked)
            self._first = (self._asked[0] + gaps[0], self._asked[1] + gaps[1], self._asked[2] + gaps[2])
            self.dropped = sum(gaps)
        for fields in (*self._inbox.events.values(), self._inbox.end):
            if fields is not None:
                self.pid = self.pid or fields.int(Tag.PID, 0)
        self._inbox.stream.live = True

    @property
    def offsets(self) -> list[int]:
        """The absolute position in each channel up to which output was read."""
        return [first + taken for first, taken in zip(self._first, self._inbox.taken[1:], strict=True)]

    def __aiter__(self) -> AsyncIterator[OutputPiece]:
        return self._iterate()

    async def _iterate(self) -> AsyncGenerator[OutputPiece, None]:
        self._reading(+1)
        try:
            while (piece := await self._inbox.take()) is not None:
                yield OutputPiece(*piece)
        finally:
            self._reading(-1)

    async def __anext__(self) -> OutputPiece:
        # A caller that takes single pieces may return for the next, so output is never discarded from now on.
        self._reading(+1)
        piece = await self._inbox.take()
        if piece is None:
            raise StopAsyncIteration
        return OutputPiece(*piece)

    async def wait(self) -> ProcessExit:
        """Wait for the process and return how it ended.

        If nothing iterates over the output, it is discarded, so that the process does not block on a full pipe.
        """
        if self.detached:
            raise RuntimeError("this process was started detached: attach to it to wait for its end")
        self._waiters += 1
        self._discard_if_unread()
        try:
            end = await self._inbox.finished()
            with self._inbox.parsing():
                return ProcessExit.decode(end)
        finally:
            self._waiters -= 1
            self._discard_if_unread()

    async def send_stdin(self, data: bytes) -> None:
        """Write to standard input. Raises BrokenPipeError once the process has ended."""
        await self._inbox.stream.alive()
        await self._inbox.stream.send_data(data)

    async def close_stdin(self) -> None:
        self._inbox.stream.end()

    def resize(self, rows: int, cols: int) -> None:
        self._inbox.stream.control(Verb.RESIZE, encode_fields([(Tag.ROWS, rows), (Tag.COLS, cols)]))

    def signal(self, number: int) -> None:
        self._inbox.stream.control(Verb.SIGNAL, encode_fields([(Tag.SIGNAL, number)]))

    def detach(self) -> None:
        """Stop following the process, which continues; its output is kept. May be repeated."""
        self._inbox.close()
        if not self._inbox.over:
            self._inbox.finish()
            self.detached = True

    def _reading(self, change: int) -> None:
        self._readers += change
        self._discard_if_unread()

    def _discard_if_unread(self) -> None:
        self._inbox.discard(self._waiters > 0 and self._readers == 0)
