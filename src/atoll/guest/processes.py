"""Processes of a sandbox: run one to its end, start and follow one, attach to it again, kill it."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import dataclasses
import enum
import errno
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from atoll.errors import AgentUnreachableError, ProtocolError, SandboxError, SandboxResourceError
from atoll.guest.capture import Capture
from atoll.guest.collector import Collector
from atoll.guest.connection import Connection
from atoll.guest.followed_process import FollowedProcess, OutputPiece, ProcessExit
from atoll.guest.frames import WINDOW, Fields, Op, Tag, encode_fields
from atoll.guest.inbox import Inbox
from atoll.guest.start_request import StartRequest
from atoll.guest.stream import Stream
from atoll.tracing import span, traced, variables

if TYPE_CHECKING:
    from atoll.guest.guest import Guest

__all__ = [
    "Capture",
    "CompletedProcess",
    "FollowedProcess",
    "OutputPiece",
    "ProcessExit",
    "ProcessInfo",
    "Processes",
    "RestartInfo",
    "RestartState",
    "StartRequest",
]

_LISTED_HEAD = struct.Struct("<H")
_LISTED_REST = struct.Struct("<QBQ")
_RESTARTED = struct.Struct("<IBBH")
_NO_CAUSE, _SIGNAL_BASE = 0, 128
_MAX_LISTED = 8 << 20
"""Far more than the 4,096 processes that an agent keeps."""
_SPARE = 1
_KILL = 9
Listed = TypeVar("Listed")


class RestartState(enum.IntEnum):
    ENDED = 0
    RUNS = 1
    WAITS = 2
    """It has ended, and the agent starts it again soon."""


@dataclass(frozen=True, slots=True)
class CompletedProcess:
    """A process that has ended, with its captured output."""

    exit: ProcessExit
    stdout: Capture
    stderr: Capture


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    id: bytes
    pid: int
    running: bool
    age_s: float


@dataclass(frozen=True, slots=True)
class RestartInfo:
    """A process that the agent starts again when it ends."""

    id: bytes
    restarts: int
    """How often it was started again."""
    state: RestartState
    exit_code: int | None
    """How it ended last, as a shell reports it; None: it has not ended yet."""


class Processes:
    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    async def run(
        self,
        request: StartRequest,
        *,
        limit_bytes: int,
        on_output: Callable[[int, bytes], None] | None = None,
        stdin: bytes | None = None,
    ) -> CompletedProcess:
        """Run a process to its end, keeping at most `limit_bytes` of each output. Cancelling kills its process tree.

        If the connection is lost, the process continues; repeating the call with the same id returns its result.
        """
        with span("agent.exec", command_id=_shown(request)) as current:
            done = await self._run(_continuing(self._by_default(request)), limit_bytes, on_output, stdin)
            current.set(cause=done.exit.cause)
            if done.exit.exit_code is not None:
                current.set(exit_code=done.exit.exit_code)
            return done

    def _by_default(self, request: StartRequest) -> StartRequest:
        if variables := self._guest.variables():
            request = dataclasses.replace(request, env={**variables, **request.env})
        user = None if request.user is not None else self._guest.default_user()
        return request if user is None else dataclasses.replace(request, user=user)

    async def _run(
        self,
        request: StartRequest,
        limit_bytes: int,
        on_output: Callable[[int, bytes], None] | None,
        stdin: bytes | None,
    ) -> CompletedProcess:
        payload = request.encode(stdin=stdin is not None)
        connection = await self._guest.connection()
        collector = Collector(connection.loop, limit_bytes, on_output)
        whole = stdin if stdin is not None and len(stdin) <= WINDOW else None
        stream = collector.stream = connection.open_stream(Op.START, payload, collector, data=whole, live=True)
        try:
            if stdin is not None and whole is None:
                await _feed(stream, stdin)
            with _naming_the_limit():
                exit = await collector.future
        except BaseException:
            # The call was cancelled or its callback failed, so nothing can use this process any more.
            if not stream.ended:
                self._abandon(connection, stream, request.id)
            raise
        return CompletedProcess(exit, collector.stdout, collector.stderr)

    async def start(self, request: StartRequest) -> FollowedProcess:
        """Start a process and return once it runs. Cancelling kills it.

        A program that cannot be executed ends with exit code 127 or 126.
        """
        with span("agent.start", command_id=_shown(request)):
            return await self._start(_continuing(self._by_default(request)))

    async def _start(self, request: StartRequest) -> FollowedProcess:
        connection = await self._guest.connection()
        process = FollowedProcess.open(connection, Op.START, request.encode(started=True))
        try:
            with _naming_the_limit():
                await process.ready()
        except asyncio.CancelledError:
            process.detach()
            _send_unanswered(connection, Op.KILL, _kill_fields(request.id))
            raise
        process.detached = request.detach
        return process

    @traced("agent.attach")
    async def attach(self, id: bytes, offsets: tuple[int, int, int] = (0, 0, 0)) -> FollowedProcess:
        """Follow a running or ended process from these offsets. FileNotFoundError if there is none."""
        tags = (Tag.OFFSET_1, Tag.OFFSET_2, Tag.OFFSET_3)
        fields = encode_fields([(Tag.ID, id), *zip(tags, offsets, strict=True)])
        process = FollowedProcess.open(await self._guest.connection(), Op.ATTACH, fields, offsets)
        try:
            await process.ready()
        except BaseException:
            process.detach()
            raise
        return process

    @traced("agent.kill")
    async def kill(self, id: bytes, signal: int = _KILL, spare: bool = False) -> None:
        """Send a signal. Signal 9 kills the whole process tree and waits until it is gone.

        With `spare`, the process itself survives and only what it started is killed.
        """
        await (await self._guest.connection()).request(Op.KILL, _kill_fields(id, signal, spare))

    async def release(self, id: bytes) -> None:
        """Let the agent forget an ended process and its output."""
        await (await self._guest.connection()).request(Op.RELEASE, encode_fields([(Tag.ID, id)]))

    def release_soon(self, id: bytes) -> None:
        """Like `release`, but without waiting for the answer; errors are ignored."""
        _send_unanswered(self._guest.current_connection(), Op.RELEASE, encode_fields([(Tag.ID, id)]))

    async def list(self) -> list[ProcessInfo]:
        """Return all processes that the agent knows, running or ended."""
        return await self._listed(Op.PROCESSES, _parse_list)

    async def restarts(self) -> dict[bytes, RestartInfo]:
        """Return, by their ids, the processes that the agent starts again when they end. An agent of an older version
        has none."""
        try:
            return {each.id: each for each in await self._listed(Op.RESTARTS, _parse_restarts)}
        except OSError as error:
            if error.errno == errno.ENOSYS:
                return {}
            raise

    async def _listed(self, op: Op, parse: Callable[[bytes], Iterator[Listed]]) -> builtins.list[Listed]:
        inbox = Inbox()
        inbox.open(await self._guest.connection(), op, b"")
        data = bytearray()
        try:
            with inbox.parsing():
                while (piece := await inbox.take()) is not None:
                    data += piece[1]
                    if len(data) > _MAX_LISTED:
                        raise ProtocolError("the agent's list of processes does not end")
                return [*parse(bytes(data))]
        finally:
            inbox.close()

    def _abandon(self, connection: Connection, stream: Stream, id: bytes) -> None:
        stream.close()
        _send_unanswered(connection, Op.KILL, _kill_fields(id))


@contextlib.contextmanager
def _naming_the_limit() -> Iterator[None]:
    """Convert EAGAIN, with which the kernel's fork reports the limit of processes, to SandboxResourceError."""
    try:
        yield
    except BlockingIOError as error:
        raise SandboxResourceError(
            "the sandbox cannot start another process",
            hint="Its limit of processes may be used up: end some, or create it with a higher limit.",
        ) from error


def _continuing(request: StartRequest) -> StartRequest:
    """Return the request with the variables by which the process continues the current trace. Its own have precedence.

    What outlives the trace gets none: a persistent shell, which has a status channel, and what is restarted."""
    found = {} if request.status or request.restart else variables()
    return dataclasses.replace(request, env={**found, **request.env}) if found else request


def _shown(request: StartRequest) -> str:
    return request.id.decode(errors="replace")


class _NoAnswer:
    """The stream handler of a request whose answer is ignored."""

    def on_data(self, channel: int, data: memoryview) -> None:
        raise ProtocolError("the agent sent unexpected data")

    def on_event(self, kind: int, fields: Fields) -> None:
        raise ProtocolError(f"the agent sent the unexpected event {kind}")

    def on_end(self, fields: Fields) -> None: ...

    def on_error(self, error: Exception) -> None: ...


def _send_unanswered(connection: Connection | None, op: Op, fields: bytes) -> None:
    if connection is not None:
        with contextlib.suppress(SandboxError):
            connection.open_stream(op, fields, _NoAnswer(), live=True)


async def _feed(stream: Stream, data: bytes) -> None:
    """Send the input. Errors are ignored: a process need not read all of its input, and the answer reports a lost
    connection."""
    with contextlib.suppress(BrokenPipeError, AgentUnreachableError):
        await stream.send_data(data)
    stream.end()


def _kill_fields(id: bytes, signal: int = _KILL, spare: bool = False) -> bytes:
    return encode_fields([(Tag.ID, id), (Tag.SIGNAL, signal), (Tag.FLAGS, _SPARE if spare else 0)])


def _parse_list(data: bytes) -> Iterator[ProcessInfo]:
    position = 0
    try:
        while position < len(data):
            (length,) = _LISTED_HEAD.unpack_from(data, position)
            position += _LISTED_HEAD.size
            id = data[position : position + length]
            pid, running, age_ns = _LISTED_REST.unpack_from(data, position + length)
            position += length + _LISTED_REST.size
            yield ProcessInfo(id, pid, bool(running), age_ns / 1e9)
    except struct.error as error:
        raise ProtocolError("the agent's list of processes stops in the middle") from error


def _parse_restarts(data: bytes) -> Iterator[RestartInfo]:
    position = 0
    try:
        while position < len(data):
            (length,) = _LISTED_HEAD.unpack_from(data, position)
            position += _LISTED_HEAD.size
            id = data[position : position + length]
            restarts, state, cause, status = _RESTARTED.unpack_from(data, position + length)
            position += length + _RESTARTED.size
            signal = status & 0x7F
            code = None if cause == _NO_CAUSE else _SIGNAL_BASE + signal if signal else status >> 8
            yield RestartInfo(id, restarts, RestartState(state), code)
    except (struct.error, ValueError) as error:
        raise ProtocolError("the agent's list of restarts is malformed") from error
