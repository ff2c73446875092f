"""Bytes on the wire: what is encoded is decoded, and nothing malformed gets through."""

from __future__ import annotations

import errno
import random
import struct

import pytest

from atoll.errors import ProtocolError
from atoll.guest.frames import (
    HEADER,
    MAX_PAYLOAD,
    Fields,
    FrameType,
    Tag,
    agent_error,
    decode_fields,
    encode_fields,
    encode_frame,
    message_of,
)


def test_a_frame_is_twelve_bytes_of_header_and_its_payload() -> None:
    frame = encode_frame(FrameType.DATA, 7, b"abc", channel=2)
    assert frame == bytes([3, 0, 0, 0, 7, 0, 0, 0, 2, 2, 0, 0]) + b"abc"
    assert HEADER.size == 12


def test_a_frame_that_no_agent_would_accept_is_not_made() -> None:
    assert len(encode_frame(FrameType.DATA, 1, bytes(MAX_PAYLOAD))) == HEADER.size + MAX_PAYLOAD
    with pytest.raises(ValueError, match="too long"):
        encode_frame(FrameType.DATA, 1, bytes(MAX_PAYLOAD + 1))


def test_fields_survive_the_way_there_and_back() -> None:
    payload = encode_fields(
        [(Tag.PATH, "gr\u00fc\udcff"), (Tag.ARG, b"one"), (Tag.ARG, b""), (Tag.MTIME_NS, -5), (Tag.SIZE, 2**64 - 1)]
    )
    fields = decode_fields(memoryview(payload))
    assert fields.bytes(Tag.PATH) == b"gr\xc3\xbc\xff"
    assert fields.all(Tag.ARG) == [b"one", b""]
    assert fields.int(Tag.MTIME_NS) == -5
    assert fields.int(Tag.SIZE) == 2**64 - 1
    assert Tag.UID not in fields


@pytest.mark.parametrize(("tag", "value"), [(Tag.SIZE, -1), (Tag.SIZE, 2**64), (Tag.MTIME_NS, 2**63)])
def test_a_number_that_does_not_fit_is_refused(tag: Tag, value: int) -> None:
    with pytest.raises(ValueError, match=tag.name):
        encode_fields([(tag, value)])


def test_what_is_missing_has_a_default_or_is_a_violation() -> None:
    fields = Fields({})
    assert fields.int(Tag.PID, 3) == 3
    assert fields.bytes(Tag.MESSAGE, b"x") == b"x"
    with pytest.raises(ProtocolError, match="lacks PID"):
        fields.int(Tag.PID)
    with pytest.raises(ProtocolError, match="lacks INSTANCE"):
        fields.bytes(Tag.INSTANCE)


def test_a_number_of_another_size_than_eight_bytes_is_a_violation() -> None:
    with pytest.raises(ProtocolError, match="PID with 4 bytes"):
        decode_fields(encode_fields([(Tag.PID, b"1234")])).int(Tag.PID)


def test_every_truncation_of_fields_is_refused_or_ends_between_two() -> None:
    parts = [encode_fields([(Tag.PATH, b"some/where")]), encode_fields([(Tag.SIZE, 9)])]
    whole = b"".join(parts)
    for length in range(len(whole)):
        if length in (0, len(parts[0])):
            decode_fields(whole[:length])
        else:
            with pytest.raises(ProtocolError):
                decode_fields(whole[:length])


def test_a_length_of_four_gigabytes_allocates_nothing() -> None:
    with pytest.raises(ProtocolError, match="longer than its frame"):
        decode_fields(struct.pack("<HI", Tag.MESSAGE, 0xFFFFFFFF) + b"x")


def test_random_bytes_are_decoded_or_refused_and_nothing_else() -> None:
    source = random.Random(1)
    for _ in range(3000):
        payload = source.randbytes(source.randrange(40))
        try:
            decode_fields(payload)
        except ProtocolError:
            continue


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, FileNotFoundError),
        (errno.EACCES, PermissionError),
        (errno.EISDIR, IsADirectoryError),
        (errno.ECONNREFUSED, ConnectionRefusedError),
    ],
)
def test_an_error_of_the_agent_is_the_builtin_exception_for_its_number(number: int, kind: type[OSError]) -> None:
    error = agent_error(decode_fields(encode_fields([(Tag.ERRNO, number), (Tag.MESSAGE, "why")])))
    assert type(error) is kind
    assert error.strerror == "why"


def test_an_impossible_error_number_is_an_input_output_error() -> None:
    assert agent_error(decode_fields(encode_fields([(Tag.ERRNO, 2**63)]))).errno == errno.EIO


def test_a_message_is_short_and_cannot_steer_a_terminal() -> None:
    text = message_of(decode_fields(encode_fields([(Tag.MESSAGE, b"\x1b[2J\xff\x00red\n" + b"x" * 100_000)])))
    assert "\x1b" not in text
    assert "\n" not in text
    assert "red" in text
    assert len(text) <= 500
