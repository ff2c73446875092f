"""A command that no system could run is refused before it is sent."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.guest import StartRequest
from atoll.guest.frames import StartFlag, Tag, decode_fields


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"argv": ["a"], "shell": "a"},
        {"argv": []},
        {"argv": [""]},
        {"argv": "ls -l"},
        {"argv": ["a\0b"]},
        {"shell": b"a\0b"},
        {"argv": ["a"], "cwd": "/x\0"},
        {"argv": ["a"], "user": "x\0"},
        {"argv": ["a"], "env": {"": "x"}},
        {"argv": ["a"], "env": {"A=B": "x"}},
        {"argv": ["a"], "env": {"A": "x\0"}},
        {"argv": ["a"], "deadline_s": -1.0},
        {"argv": ["a"], "deadline_s": float("nan")},
        {"argv": ["a", "x" * 131_073]},
        {"id": b"", "argv": ["a"]},
        {"id": b"x" * 65, "argv": ["a"]},
    ],
)
def test_what_makes_no_sense_is_a_value_error(values: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"process id|either|empty|list of arguments|zero byte|environment|seconds|too long"
    ):
        StartRequest(**{"id": b"1", **values})


def test_more_than_fits_into_a_request_is_too_long() -> None:
    request = StartRequest(b"1", argv=["a", *["x" * 100_000] * 3])
    with pytest.raises(ValueError, match="too long"):
        request.encode()


def test_every_part_reaches_the_agent() -> None:
    request = StartRequest(
        b"me",
        argv=["prog", b"\xff", ""],
        env={"A": "=", "B": ""},
        cwd="/w",
        user="1:2",
        stdin=True,
        pty=(24, 80),
        merge=True,
        status=True,
        detach=True,
        deadline_s=0.0,
        grace_s=1.5,
        rlimits=[(7, 10, 20)],
        keep_bytes=5,
    )
    fields = decode_fields(request.encode(started=True))
    assert fields.all(Tag.ARG) == [b"prog", b"\xff", b""]
    assert fields.all(Tag.ENV) == [b"A==", b"B="]
    assert (fields.bytes(Tag.CWD), fields.bytes(Tag.USER)) == (b"/w", b"1:2")
    assert StartFlag(fields.int(Tag.FLAGS)) == StartFlag(63)
    assert (fields.int(Tag.DEADLINE_MS), fields.int(Tag.GRACE_MS)) == (1, 1500)
    assert fields.bytes(Tag.RLIMIT) == b"".join(n.to_bytes(8, "little") for n in (7, 10, 20))
    assert (fields.int(Tag.ROWS), fields.int(Tag.COLS), fields.int(Tag.KEEP)) == (24, 80, 5)


def test_no_deadline_and_an_infinite_one_are_the_same() -> None:
    for deadline_s in (None, float("inf")):
        fields = decode_fields(StartRequest(b"1", shell="x", deadline_s=deadline_s).encode())
        assert Tag.DEADLINE_MS not in fields
