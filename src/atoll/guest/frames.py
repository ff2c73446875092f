"""The constants of the agent protocol (docs/protocol.md), and encoding and decoding of frames and fields.

All decoded data comes from a sandbox and is not trusted: every length is checked before it is used, and malformed data
raises `ProtocolError`.
"""

from __future__ import annotations

import enum
import errno
import struct
from collections.abc import Iterable

from atoll.errors import ProtocolError
from atoll.printable import printable

VERSION = 1
MAX_PAYLOAD = 262_144
WINDOW = 262_144
"""The credit with which each direction of each stream starts."""
MAX_STREAMS = 4096
MAX_STRING = 131_072
MAX_PATH = 4095
MAX_ID = 64
INSTANCE_BYTES = 16

HEADER = struct.Struct("<IIBBH")
"""Payload length, stream, type, channel, zero."""

_FIELD = struct.Struct("<HI")
_NUMBER_FIELD = struct.Struct("<HIQ")
_SIGNED_FIELD = struct.Struct("<HIq")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_MAX_MESSAGE = 500


class FrameType(enum.IntEnum):
    OPEN = 1
    DATA = 2
    END = 3
    CREDIT = 4
    CONTROL = 5
    CLOSE = 6
    EVENT = 7
    ERROR = 8


class Op(enum.IntEnum):
    HELLO = 1
    STATS = 2
    START = 10
    ATTACH = 11
    PROCESSES = 12
    KILL = 13
    RELEASE = 14
    RESTARTS = 15
    SUDO = 16
    STAT = 20
    LIST = 21
    MKDIR = 22
    RENAME = 23
    REMOVE = 24
    CHMOD = 25
    CHOWN = 26
    SYMLINK = 27
    READ = 28
    WRITE = 29
    WALK = 30
    PUT_TREE = 31
    GET_TREE = 32
    WATCH = 33
    CONNECT = 40


class Verb(enum.IntEnum):
    RESIZE = 1
    SIGNAL = 2


class EventKind(enum.IntEnum):
    STARTED = 1
    ATTACHED = 2
    FILE = 3
    READY = 4
    CONNECTED = 5
    EOF = 6


class StartFlag(enum.IntFlag):
    STDIN = 1
    PTY = 2
    MERGE = 4
    STATUS = 8
    STARTED = 16
    DETACH = 32
    FORGET = 64
    CLEAN = 128
    EXISTING = 256


class RestartPolicy(enum.IntEnum):
    NEVER = 0
    ALWAYS = 1
    ON_FAILURE = 2


class Tag(enum.IntEnum):
    ID = 1
    ARG = 2
    SHELL = 3
    ENV = 4
    CWD = 5
    USER = 6
    FLAGS = 7
    DEADLINE_MS = 8
    GRACE_MS = 9
    RLIMIT = 10
    ROWS = 11
    COLS = 12
    KEEP = 13
    OFFSET_1 = 14
    OFFSET_2 = 15
    OFFSET_3 = 16
    SIGNAL = 17
    PID = 18
    EXIT_CODE = 19
    TERM_SIGNAL = 20
    CAUSE = 21
    END_1 = 22
    END_2 = 23
    END_3 = 24
    DURATION_NS = 25
    CPU_NS = 26
    MAX_RSS_BYTES = 27
    ERRNO = 28
    MESSAGE = 29
    PATH = 30
    TARGET = 31
    MODE = 32
    UID = 33
    GID = 34
    SIZE = 35
    MTIME_NS = 36
    KIND = 37
    OFFSET = 38
    LENGTH = 39
    NLINK = 40
    INODE = 41
    DEVICE = 42
    PORT = 50
    VERSION = 60
    INSTANCE = 61
    UPTIME_NS = 62
    RSS_BYTES = 63
    PROCESSES = 64
    STREAMS = 65
    CONNECTIONS = 66
    OUTPUT_BYTES = 67
    CAPACITY = 68
    RUNNING = 69
    RESTART = 70


def encode_text(text: str | bytes) -> bytes:
    """Encode like `os.fsencode`, but always as UTF-8: requests must not depend on the host's locale."""
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text


def decode_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def encode_frame(type: FrameType, stream: int, payload: bytes = b"", channel: int = 0) -> bytes:
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"too long: {len(payload)} bytes in one frame, at most {MAX_PAYLOAD} are possible")
    return HEADER.pack(len(payload), stream, type, channel, 0) + payload


def encode_u16(value: int) -> bytes:
    return _U16.pack(value)


def encode_u32(value: int) -> bytes:
    return _U32.pack(value)


def encode_open(op: Op, stream: int, fields: bytes, window: int) -> bytes:
    """Return the frames that open a stream: the request, and any credit beyond the initial WINDOW."""
    frames = encode_frame(FrameType.OPEN, stream, encode_u16(op) + fields)
    return frames + encode_credit(stream, window - WINDOW) if window > WINDOW else frames


def encode_credit(stream: int, size: int) -> bytes:
    return encode_frame(FrameType.CREDIT, stream, encode_u32(size))


def encode_fields(fields: Iterable[tuple[Tag, int | bytes | str]]) -> bytes:
    parts: list[bytes] = []
    for tag, value in fields:
        if isinstance(value, int):
            if not -(1 << 63) <= value < (1 << 63 if tag is Tag.MTIME_NS else 1 << 64):
                raise ValueError(f"{tag.name} cannot be {value}")
            if value < 0 and tag is not Tag.MTIME_NS:
                raise ValueError(f"{tag.name} cannot be negative")
            parts.append((_SIGNED_FIELD if value < 0 else _NUMBER_FIELD).pack(tag, 8, value))
        else:
            raw = encode_text(value)
            parts.append(_FIELD.pack(tag, len(raw)))
            parts.append(raw)
    return b"".join(parts)


class Fields:
    """Decoded fields. The getters raise ProtocolError if a field is missing or malformed."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[int, list[bytes]]) -> None:
        self._values = values

    def __contains__(self, tag: int) -> bool:
        return tag in self._values

    def all(self, tag: int) -> list[bytes]:
        return self._values.get(tag, [])

    def bytes(self, tag: int, default: bytes | None = None) -> bytes:
        values = self._values.get(tag)
        if values is not None:
            return values[0]
        if default is None:
            raise ProtocolError(f"the agent's answer lacks {_name(tag)}")
        return default

    def int(self, tag: int, default: int | None = None) -> int:
        values = self._values.get(tag)
        if values is None:
            if default is None:
                raise ProtocolError(f"the agent's answer lacks {_name(tag)}")
            return default
        if len(values[0]) != 8:
            raise ProtocolError(f"the agent sent {_name(tag)} with {len(values[0])} bytes instead of 8")
        return int.from_bytes(values[0], "little", signed=tag == Tag.MTIME_NS)


def decode_fields(payload: memoryview | bytes) -> Fields:
    values: dict[int, list[bytes]] = {}
    raw = bytes(payload)
    position, end = 0, len(raw)
    while position < end:
        if end - position < _FIELD.size:
            raise ProtocolError("the agent sent a truncated field")
        tag, length = _FIELD.unpack_from(raw, position)
        position += _FIELD.size
        if length > end - position:
            raise ProtocolError(f"the agent sent {_name(tag)} that is longer than its frame")
        values.setdefault(tag, []).append(raw[position : position + length])
        position += length
    return Fields(values)


def decode_u16(payload: memoryview) -> int:
    """Return the kind of an event, which is the number at its start."""
    if len(payload) < _U16.size:
        raise ProtocolError("the agent sent an event without a kind")
    value: int = _U16.unpack_from(payload)[0]
    return value


def decode_credit(payload: memoryview) -> int:
    if len(payload) != _U32.size:
        raise ProtocolError("the agent sent malformed credit")
    value: int = _U32.unpack(payload)[0]
    return value


def agent_error(fields: Fields) -> OSError:
    """Convert the fields of an ERROR frame to the built-in OSError for its errno."""
    number = fields.int(Tag.ERRNO)
    if number not in errno.errorcode:
        number = errno.EIO
    return OSError(number, message_of(fields) or errno.errorcode[number])


def message_of(fields: Fields) -> str:
    """Return the MESSAGE of a frame, made printable and of limited length."""
    return printable(fields.bytes(Tag.MESSAGE, b""), _MAX_MESSAGE)


def _name(tag: int) -> str:
    try:
        return Tag(tag).name
    except ValueError:
        return f"field {tag}"
