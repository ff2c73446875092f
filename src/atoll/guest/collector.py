"""The fast path for a command that is run to its end: output goes directly from the connection into two captures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.errors import ProtocolError
from atoll.guest.capture import Capture
from atoll.guest.followed_process import ProcessExit, dropped_at_attach
from atoll.guest.frames import EventKind, Fields
from atoll.guest.stream import Stream


class Collector:
    """The stream handler of such a command. The caller that opens the stream sets `stream`."""

    __slots__ = ("_attached", "_on_output", "future", "stderr", "stdout", "stream")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limit_bytes: int, on_output: Callable[[int, bytes], None] | None
    ) -> None:
        self.stream: Stream
        self.future: asyncio.Future[ProcessExit] = loop.create_future()
        self.stdout = Capture(limit_bytes)
        self.stderr = Capture(limit_bytes)
        self._on_output = on_output
        self._attached = False

    def on_data(self, channel: int, data: memoryview) -> None:
        if channel == 1:
            self.stdout.add(data)
        elif channel == 2:
            self.stderr.add(data)
        elif channel == 0:
            raise ProtocolError("the agent sent output on the channel of input")
        self.stream.grant(len(data))
        if self._on_output is not None:
            self._tell(channel, bytes(data))

    def on_event(self, kind: int, fields: Fields) -> None:
        # ATTACHED comes only if the agent knew the id: an earlier request started the command and lost its answer.
        if kind != EventKind.ATTACHED or self._attached:
            raise ProtocolError(f"the agent sent the unexpected event {kind}")
        self._attached = True
        gaps = dropped_at_attach(fields, (0, 0, 0))
        self.stdout.miss(gaps[0])
        self.stderr.miss(gaps[1])

    def on_end(self, fields: Fields) -> None:
        exit = ProcessExit.decode(fields)
        if not self.future.done():
            self.future.set_result(exit)

    def on_error(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def _tell(self, channel: int, data: bytes) -> None:
        assert self._on_output is not None
        try:
            self._on_output(channel, data)
        except Exception as error:
            # An error in the caller's callback must reach the caller, not the connection, which others share.
            self._on_output = None
            self.on_error(error)
