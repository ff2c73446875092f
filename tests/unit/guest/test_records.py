"""Records: any division into frames gives the same files, and a path never leads anywhere else."""

from __future__ import annotations

import random
import struct

import pytest

from atoll.errors import ProtocolError
from atoll.guest.file_records import DIRECTORY, FILE, LINK, RECORD, FileRecordParser, check_relative, encode_record


def _records() -> bytes:
    return b"".join(
        [
            encode_record(DIRECTORY, b"a", 0o755, 0, -1),
            encode_record(FILE, b"a/\xff\xfe", 0o104755, 12, 1_500_000_000),
            encode_record(LINK, b"a/l", 0o777, 0, 0, b"../../etc"),
        ]
    )


def test_a_record_is_36_bytes_and_two_strings() -> None:
    assert RECORD.size == 36
    assert len(encode_record(LINK, b"abc", 0, 0, 0, b"de")) == 41


def test_records_are_the_same_however_the_stream_is_divided() -> None:
    stream, source = _records() * 3, random.Random(2)
    whole = list(FileRecordParser().feed(stream))
    assert [record.path for record in whole[:3]] == [b"a", b"a/\xff\xfe", b"a/l"]
    for _ in range(200):
        parser, found, position = FileRecordParser(), [], 0
        while position < len(stream):
            size = source.randrange(1, 50)
            found += list(parser.feed(stream[position : position + size]))
            position += size
        parser.finish()
        assert found == whole


def test_a_record_becomes_file_info() -> None:
    directory, file, link = (record.info() for record in FileRecordParser().feed(_records()))
    assert (directory.kind, directory.mtime_s) == ("directory", -1e-9)
    assert (file.path, file.kind, file.mode, file.size, file.mtime_s) == ("a/\udcff\udcfe", "file", 0o4755, 12, 1.5)
    assert file.name == "\udcff\udcfe"
    assert (link.kind, link.target, file.target) == ("link", "../../etc", None)


def test_a_stream_that_stops_in_a_record_is_a_violation() -> None:
    parser = FileRecordParser()
    list(parser.feed(_records()[:-1]))
    with pytest.raises(ProtocolError, match="in the middle"):
        parser.finish()


@pytest.mark.parametrize(
    "record",
    [
        encode_record(ord("x"), b"a", 0, 0, 0),
        encode_record(FILE, b"a\0b", 0, 0, 0),
        encode_record(FILE, b"a" * 4096, 0, 0, 0),
        struct.pack("<BBHHHIIIQq", FILE, 1, 1, 0, 0, 0, 0, 0, 0, 0) + b"a",
        struct.pack("<BBHHHIIIQq", FILE, 0, 1, 0, 9, 0, 0, 0, 0, 0) + b"a",
    ],
    ids=["kind", "zero byte", "long path", "reserved byte", "reserved word"],
)
def test_a_malformed_record_is_a_violation(record: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(FileRecordParser().feed(record))


@pytest.mark.parametrize("path", [b"", b"/", b"/etc/passwd", b"..", b"a/..", b"a//b", b"a/", b".", b"a/./b", b"a\0"])
def test_a_path_that_could_lead_elsewhere_is_a_violation(path: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a plain relative one"):
        check_relative(path)
    assert check_relative(b"a/..b/.c") == [b"a", b"..b", b".c"]
