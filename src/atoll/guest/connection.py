"""One connection to an agent, on one event loop, shared by many streams.

The agent is not trusted: any deviation from the protocol fails the connection and all of its streams. Memory is bounded
by one buffer, the credit of each stream and the number of streams.
"""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from atoll.errors import AgentError, AgentUnreachableError, ProtocolError, SandboxError, SandboxResourceError
from atoll.guest.frames import (
    INSTANCE_BYTES,
    MAX_STREAMS,
    VERSION,
    WINDOW,
    Fields,
    FrameType,
    Op,
    Tag,
    agent_error,
    decode_credit,
    decode_fields,
    decode_u16,
    encode_frame,
    encode_open,
    message_of,
)
from atoll.guest.stream import Stream, StreamHandler
from atoll.guest.wire import Wire
from atoll.waiting import EventSignal

T = TypeVar("T")
Connect = Callable[[], Awaitable[socket.socket]]
"""Opens a new stream socket to the agent each time it is called."""
Diagnose = Callable[[], Awaitable[None]]
"""Raises the reason why a sandbox cannot answer, or returns if none is known."""
_PATIENCE_S = (0.5, 1.5, 3.0, 5.0, 10.0, 20.0, 20.0)
"""After each of these waits the reason is looked for. While an agent removes a large tree, it does not answer."""
_MAX_CREDIT = 1 << 32
_LAST_CHANNEL = 3
_FRESH_S = 1.0
"""An agent that sent something within this time is assumed to be reachable, without a request."""
_SILENT_S = 5.0
"""After this time without data from the agent, pending requests are checked: they fail if no answer can come."""
_DYING_S = (0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
_DATA, _END, _CREDIT, _EVENT, _ERROR = map(
    int, (FrameType.DATA, FrameType.END, FrameType.CREDIT, FrameType.EVENT, FrameType.ERROR)
)
"""These are plain integers because comparing with an enum member costs an attribute lookup for every frame."""


async def dial(connect: Connect, timeout_s: float) -> socket.socket:
    """Open a socket to the agent. Raises AgentUnreachableError, or the engine's own error."""
    try:
        async with asyncio.timeout(timeout_s):
            return await connect()
    except OSError as error:
        # A TimeoutError is an OSError too.
        reason = error.strerror or str(error) or f"no connection within {timeout_s:g} s"
        raise AgentUnreachableError(f"cannot reach the agent: {reason}") from error


async def answered(work: Coroutine[Any, Any, T], diagnose: Diagnose) -> T:
    """Return the result of a request to an agent that may never answer.

    Raises the reason as soon as `diagnose` raises it, or AgentUnreachableError after a minute.
    """
    task = asyncio.ensure_future(work)
    try:
        for seconds in _PATIENCE_S:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if done:
                return task.result()
            await diagnose()
        raise AgentUnreachableError(f"the sandbox did not answer within {sum(_PATIENCE_S):g} s")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


class Connection:
    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.closed = False
        self.instance = b""
        """Random id of this run of the agent. A new id means that all earlier processes are gone."""
        self._wire = Wire(sock, loop, self._on_frame, self._lost)
        self._streams: dict[int, Stream] = {}
        self._last_number = 0
        self.diagnose: Diagnose | None = None
        """Raises the reason why the agent cannot answer, if there is one. If this is None, requests wait forever."""
        self._guard: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self.send = self._wire.send
        """Write complete frames. This never raises: a lost connection is reported to every stream's handler."""

    @classmethod
    async def open(cls, sock: socket.socket, timeout_s: float = 10.0) -> Connection:
        """Exchange HELLO with the agent on a connected socket. The new connection owns the socket."""
        connection = cls(sock, asyncio.get_running_loop())
        try:
            async with asyncio.timeout(timeout_s):
                hello = await connection.request(Op.HELLO)
            if hello.int(Tag.VERSION) != VERSION:
                raise ProtocolError(f"the agent speaks version {hello.int(Tag.VERSION)}, this is version {VERSION}")
            connection.instance = hello.bytes(Tag.INSTANCE)
            if len(connection.instance) != INSTANCE_BYTES:
                raise ProtocolError("the agent sent a malformed INSTANCE")
        except TimeoutError as error:
            connection.close()
            raise AgentUnreachableError(f"the agent did not answer within {timeout_s:g} s") from error
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def is_idle(self) -> bool:
        """Whether the connection has no open streams."""
        return not self._streams

    @property
    def congested(self) -> bool:
        """Whether data is waiting to be sent because the agent reads too slowly."""
        return self._wire.congested

    @property
    def drained(self) -> EventSignal:
        return self._wire.drained

    def open_stream(
        self,
        op: Op,
        fields: bytes,
        handler: StreamHandler,
        *,
        window: int = WINDOW,
        data: bytes | None = None,
        live: bool = False,
    ) -> Stream:
        """Send a request immediately. With `data` (at most WINDOW bytes), also send its complete input and the END.

        A `live` stream may stay silent: it does not count as waiting for an answer (see `Stream.live`).
        """
        if self.closed:
            raise AgentUnreachableError("the connection to the agent was lost")
        if len(self._streams) >= MAX_STREAMS:
            raise SandboxResourceError(f"more than {MAX_STREAMS} requests at once to one sandbox")
        number = self._last_number + 1
        frames = encode_open(op, number, fields, window)
        stream = Stream(self, number, handler, window)
        if data is not None:
            if data:
                frames += encode_frame(FrameType.DATA, number, data)
            frames += encode_frame(FrameType.END, number)
            stream.send_credit -= len(data)
            stream.write_ended = True
        self._last_number = number
        self._streams[number] = stream
        stream.live = live
        if self._guard is None and self.diagnose is not None and not live:
            self._guard = self.loop.call_later(_SILENT_S, self._check_silence)
        self.send(frames)
        return stream

    async def alive(self) -> None:
        """Return if the agent was heard recently, or once it answers. Raises AgentUnreachableError, or the reason why
        it cannot answer."""
        if self.diagnose is not None and self.loop.time() - self._wire.heard >= _FRESH_S:
            await answered(self.request(Op.HELLO, live=True), self.diagnose)

    def doubt(self) -> None:
        """Make the next `alive` ask the agent, even if it was heard recently."""
        self._wire.heard -= _FRESH_S

    async def request(self, op: Op, fields: bytes = b"", *, live: bool = False) -> Fields:
        """Send a request and return its answer. Cancelling closes the stream, so the agent can stop working on it."""
        answer = Answer(self.loop)
        stream = self.open_stream(op, fields, answer, live=live)
        try:
            return await answer.future
        finally:
            stream.close()

    def close(self) -> None:
        """Close the connection. This may be called from any event loop or none, and may be repeated."""
        if self.loop.is_closed():
            # Nothing can wait on a closed loop, so no handler needs to be called.
            self.closed = True
            self._streams.clear()
            self._wire.close()
        elif self.loop.is_running() and _running_loop() is not self.loop:
            self.loop.call_soon_threadsafe(self.close)
        else:
            self.fail(AgentUnreachableError("the connection to the agent was closed"))

    async def aclose(self) -> None:
        self.close()

    def fail(self, error: AgentError) -> None:
        """Report the error to every stream and close. Called when the connection breaks or violates the protocol."""
        if self.closed:
            return
        self.closed = True
        if self._guard is not None:
            self._guard.cancel()
        self._wire.close()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.ended = True
            stream.wake()
            if not stream.closed:
                # Each stream gets its own exception: one raised in several tasks would collect all their tracebacks.
                stream.handler.on_error(type(error)(error.reason))

    def _check_silence(self) -> None:
        """Check pending requests after a silence. A paused sandbox does not close its connection, so they might wait
        for an answer that cannot come."""
        self._guard = None
        if self.closed or not self._waiting():
            return
        quiet_s = self.loop.time() - self._wire.heard
        if quiet_s < _SILENT_S:
            self._guard = self.loop.call_later(_SILENT_S - quiet_s, self._check_silence)
        else:
            self._asking = self.loop.create_task(self._ask_why())

    async def _ask_why(self) -> None:
        try:
            await self.alive()
        except AgentError as error:
            self.fail(error)
        except SandboxError as error:
            for stream in self._waiting():
                stream.close()
                stream.handler.on_error(copy.copy(error))
            self.drained.notify()
        else:
            self._guard = self.loop.call_later(_SILENT_S, self._check_silence)

    def _lost(self, error: AgentError) -> None:
        """Fail all streams after the connection broke. Pending requests fail a moment later, with the reason, because
        the engine needs that moment to learn it."""
        waiting = self._waiting() if self.diagnose is not None and isinstance(error, AgentUnreachableError) else []
        for stream in waiting:
            del self._streams[stream.number]
            stream.ended = True
        self.fail(error)
        for stream in waiting:
            stream.wake()
        if waiting:
            self._asking = self.loop.create_task(self._tell_why(waiting, error))

    async def _tell_why(self, waiting: list[Stream], error: SandboxError) -> None:
        assert self.diagnose is not None
        try:
            for pause_s in _DYING_S:
                await asyncio.sleep(pause_s)
                await self.diagnose()
        except SandboxError as reason:
            error = reason
        finally:
            for stream in waiting:
                if not stream.closed:
                    stream.handler.on_error(copy.copy(error))

    def _waiting(self) -> list[Stream]:
        return [stream for stream in self._streams.values() if not (stream.live or stream.closed)]

    def _on_frame(self, number: int, kind: int, channel: int, reserved: int, payload: memoryview) -> None:
        if reserved or channel > _LAST_CHANNEL or (channel and kind != _DATA):
            raise ProtocolError("the agent sent a malformed frame header")
        stream = self._streams.get(number)
        if stream is None:
            self._refuse(number, kind, payload)
        if kind == _DATA:
            stream.receive_credit -= len(payload)
            if stream.receive_credit < 0:
                raise ProtocolError("the agent sent more data than it was allowed to")
            if not stream.closed:
                stream.handler.on_data(channel, payload)
        elif kind in (_END, _ERROR):
            self._finish(stream, kind, decode_fields(payload))
        elif kind == _EVENT:
            event, fields = decode_u16(payload), decode_fields(payload[2:])
            if not stream.closed:
                stream.handler.on_event(event, fields)
        elif kind == _CREDIT:
            stream.send_credit += decode_credit(payload)
            if stream.send_credit > _MAX_CREDIT:
                raise ProtocolError("the agent granted too much credit")
            stream.wake()
        else:
            raise ProtocolError(f"the agent sent a frame of type {kind}, which an agent must not send")

    def _finish(self, stream: Stream, kind: int, fields: Fields) -> None:
        error = agent_error(fields) if kind == _ERROR else None
        del self._streams[stream.number]
        stream.ended = True
        stream.wake()
        self.drained.notify()
        if stream.closed:
            return
        if error is not None:
            stream.handler.on_error(error)
            return
        try:
            stream.handler.on_end(fields)
        except ProtocolError as refusal:
            # The stream was removed above, so `fail` will not report the error to it.
            stream.handler.on_error(refusal)
            raise

    def _refuse(self, number: int, kind: int, payload: memoryview) -> NoReturn:
        if number == 0 and kind == _ERROR:
            reason = message_of(decode_fields(payload))
            raise ProtocolError(f"the agent rejected a frame: {reason}")
        if number > self._last_number or number == 0:
            raise ProtocolError(f"the agent sent a frame for stream {number}, which was never opened")
        raise ProtocolError(f"the agent sent a frame for stream {number} after its last one")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Answer:
    """The stream handler of a request whose answer is a single END frame."""

    __slots__ = ("future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Fields] = loop.create_future()

    def on_data(self, channel: int, data: memoryview) -> None:
        raise ProtocolError("the agent sent unexpected data")

    def on_event(self, kind: int, fields: Fields) -> None:
        raise ProtocolError(f"the agent sent the unexpected event {kind}")

    def on_end(self, fields: Fields) -> None:
        if not self.future.done():
            self.future.set_result(fields)

    def on_error(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
