"""A plain client of the agent: blocking, one thread, and free to send what a decent host never would."""

from __future__ import annotations

import struct
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from atoll.guest.frames import (
    HEADER,
    MAX_PAYLOAD,
    EventKind,
    Fields,
    FrameType,
    Op,
    Tag,
    Verb,
    decode_fields,
    encode_fields,
    encode_u16,
    encode_u32,
)

FieldList = Iterable[tuple[Tag, int | bytes | str]]
PATIENCE_S = 20.0
EXIT, SIGNAL, TIMEOUT, KILLED, LOST = 1, 2, 3, 4, 5
"""How a process ended."""


class ClosedError(Exception):
    """The agent closed the connection."""


@dataclass(frozen=True)
class Frame:
    type: FrameType
    stream: int
    channel: int
    payload: bytes

    @property
    def fields(self) -> Fields:
        return decode_fields(self.payload[2:] if self.type is FrameType.EVENT else self.payload)

    @property
    def kind(self) -> EventKind:
        assert self.type is FrameType.EVENT
        return EventKind(int.from_bytes(self.payload[:2], "little"))

    @property
    def errno(self) -> int:
        assert self.type is FrameType.ERROR, self
        return self.fields.int(Tag.ERRNO)


@dataclass
class Answer:
    """All that came on one stream, up to its END or ERROR."""

    data: dict[int, bytearray] = field(default_factory=lambda: defaultdict(bytearray))
    frames: list[Frame] = field(default_factory=list)

    def add(self, frame: Frame) -> None:
        if frame.type is FrameType.DATA:
            self.data[frame.channel] += frame.payload
        self.frames.append(frame)

    @property
    def last(self) -> Frame:
        return self.frames[-1]

    @property
    def errno(self) -> int:
        return self.last.errno

    @property
    def end(self) -> Fields:
        assert self.last.type is FrameType.END, self.last
        return self.last.fields

    @property
    def body(self) -> bytes:
        return bytes(self.data[0])

    @property
    def stdout(self) -> bytes:
        return bytes(self.data[1])

    @property
    def stderr(self) -> bytes:
        return bytes(self.data[2])

    @property
    def status(self) -> bytes:
        return bytes(self.data[3])

    @property
    def exit_code(self) -> int:
        return self.end.int(Tag.EXIT_CODE)

    @property
    def cause(self) -> int:
        return self.end.int(Tag.CAUSE)

    def event(self, kind: EventKind) -> Fields:
        return next(f.fields for f in self.frames if f.type is FrameType.EVENT and f.kind is kind)


def frame_bytes(type: int, stream: int, payload: bytes = b"", channel: int = 0, reserved: int = 0) -> bytes:
    return HEADER.pack(len(payload), stream, type, channel, reserved) + payload


def open_bytes(stream: int, op: int, fields: bytes) -> bytes:
    return frame_bytes(FrameType.OPEN, stream, encode_u16(op) + fields)


class Wire(Protocol):
    """What a connection needs of a socket; a pair of pipes can do it too."""

    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, most: int, /) -> bytes: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Connection:
    """Frames of several streams may be in flight; those of a stream that nobody waits for yet are put aside."""

    def __init__(self, sock: Wire, grant: bool = True) -> None:
        self.sock = sock
        self.grant = grant
        """Whether to give back credit for DATA as it is taken."""
        self.credit: dict[int, int] = defaultdict(lambda: 262_144)
        self._last = 0
        self._buffer = bytearray()
        self._aside: dict[int, deque[Frame]] = defaultdict(deque)
        sock.settimeout(PATIENCE_S)

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # sending

    def send(self, type: int, stream: int, payload: bytes = b"", channel: int = 0, reserved: int = 0) -> None:
        self.sock.sendall(frame_bytes(type, stream, payload, channel, reserved))

    def open(self, op: int, fields: FieldList = ()) -> int:
        self._last += 1
        self.sock.sendall(open_bytes(self._last, op, encode_fields(fields)))
        return self._last

    def open_raw(self, op: int, fields: bytes) -> int:
        self._last += 1
        self.sock.sendall(open_bytes(self._last, op, fields))
        return self._last

    def skip_to(self, number: int) -> None:
        self._last = number

    def data(self, stream: int, data: bytes) -> None:
        """As much as it takes, waiting for credit."""
        view = memoryview(data)
        while view:
            while not self.credit[stream]:
                self._put_aside(self.receive())
            part = view[: min(len(view), self.credit[stream], MAX_PAYLOAD)]
            self.credit[stream] -= len(part)
            self.send(FrameType.DATA, stream, bytes(part))
            view = view[len(part) :]

    def end(self, stream: int) -> None:
        self.send(FrameType.END, stream)

    def give_credit(self, stream: int, amount: int) -> None:
        self.send(FrameType.CREDIT, stream, encode_u32(amount))

    def control(self, stream: int, verb: Verb, fields: FieldList) -> None:
        self.send(FrameType.CONTROL, stream, encode_u16(verb) + encode_fields(fields))

    # receiving

    def receive(self) -> Frame:
        """The next frame, whatever its stream."""
        head = self._exactly(HEADER.size)
        length, stream, type, channel, reserved = HEADER.unpack(head)
        assert length <= MAX_PAYLOAD, "the agent sent more than it may"
        assert reserved == 0
        frame = Frame(FrameType(type), stream, channel, self._exactly(length))
        if frame.type is FrameType.CREDIT:
            self.credit[stream] += int.from_bytes(frame.payload, "little")
        elif frame.type is FrameType.DATA and self.grant and length:
            self.give_credit(stream, length)
        return frame

    def _exactly(self, length: int) -> bytes:
        while len(self._buffer) < length:
            try:
                part = self.sock.recv(1 << 18)
            except ConnectionResetError:
                part = b""
            if not part:
                raise ClosedError
            self._buffer += part
        taken = bytes(self._buffer[:length])
        del self._buffer[:length]
        return taken

    def _put_aside(self, frame: Frame) -> None:
        if frame.type is not FrameType.CREDIT:
            self._aside[frame.stream].append(frame)

    def next(self, stream: int) -> Frame:
        """The next frame of one stream; credit is taken note of and not shown."""
        while not self._aside[stream]:
            self._put_aside(self.receive())
        return self._aside[stream].popleft()

    def event(self, stream: int, kind: EventKind) -> Fields:
        frame = self.next(stream)
        assert frame.type is FrameType.EVENT, frame
        assert frame.kind is kind
        return frame.fields

    def finish(self, stream: int) -> Answer:
        answer = Answer()
        while not answer.frames or answer.last.type not in (FrameType.END, FrameType.ERROR):
            answer.add(self.next(stream))
        return answer

    def until(self, stream: int, wanted: bytes, channel: int = 1) -> bytes:
        """Output of a stream until it contains this."""
        seen = bytearray()
        while wanted not in seen:
            frame = self.next(stream)
            assert frame.type in (FrameType.DATA, FrameType.EVENT), frame
            if frame.type is FrameType.DATA and frame.channel == channel:
                seen += frame.payload
        return bytes(seen)

    def call(self, op: int, fields: FieldList = (), data: bytes | None = None) -> Answer:
        stream = self.open(op, fields)
        if data is not None:
            self.data(stream, data)
            self.end(stream)
        return self.finish(stream)

    def hello(self) -> Fields:
        return self.call(Op.HELLO).end

    def refusal(self) -> Frame:
        """The ERROR on stream 0 that the agent closes the connection with, and that it does close it."""
        refused: Frame | None = None
        try:
            while True:
                frame = self.receive()
                if frame.stream == 0:
                    refused = frame
        except ClosedError:
            assert refused is not None, "closed without a word"
            return refused

    # processes

    def start(self, id: str, *words: str, **more: int | str | bytes) -> int:
        """`start("a", "sleep 1", flags=…)` runs a shell line, with several words a program. Others are fields."""
        fields: list[tuple[Tag, int | bytes | str]] = [(Tag.ID, id)]
        fields += [(Tag.SHELL, words[0])] if len(words) == 1 else [(Tag.ARG, word) for word in words]
        fields += [(Tag[name.upper()], value) for name, value in more.items()]
        return self.open(Op.START, fields)

    def run(self, id: str, *words: str, **more: int | str | bytes) -> Answer:
        return self.finish(self.start(id, *words, **more))

    def kill(self, id: str, signal: int = 9, flags: int = 0) -> Answer:
        return self.call(Op.KILL, [(Tag.ID, id), (Tag.SIGNAL, signal), (Tag.FLAGS, flags)])


# records, items and watch records, as docs/protocol.md has them

RECORD = struct.Struct("<BBHHHIIIQq")
WATCHED = struct.Struct("<BBH")


@dataclass(frozen=True)
class Record:
    kind: str
    path: bytes
    target: bytes = b""
    mode: int = 0o644
    size: int = 0
    mtime_ns: int = 0
    content: bytes = b""

    def encode(self) -> bytes:
        sizes = (len(self.path), len(self.target))
        head = RECORD.pack(ord(self.kind), 0, *sizes, 0, self.mode, 0, 0, self.size, self.mtime_ns)
        return head + self.path + self.target + self.content


def parse_records(data: bytes, contents: bool = False) -> list[Record]:
    records, at = [], 0
    while at < len(data):
        kind, _, path_length, target_length, _, mode, _, _, size, mtime = RECORD.unpack_from(data, at)
        at += RECORD.size
        path, target = data[at : at + path_length], data[at + path_length : at + path_length + target_length]
        at += path_length + target_length
        content = data[at : at + size] if contents and kind == ord("f") else b""
        at += len(content)
        records.append(Record(chr(kind), path, target, mode, size, mtime, content))
    assert at == len(data)
    return records


def eventually(condition: object, what: str = "it") -> None:
    """Wait until a condition (a function without arguments) holds."""
    assert callable(condition)
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, f"{what} did not come true"
        time.sleep(0.005)
