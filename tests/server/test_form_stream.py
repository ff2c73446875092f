"""Forms as they arrive: however they are cut into pieces, each part comes out whole; malformed ones are refused."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator

import pytest
from starlette.exceptions import HTTPException

from atoll.server.connections.form_stream import parts

KIND = "multipart/form-data; boundary=XyZ"


def form(*fields: tuple[str, bytes], end: bytes = b"--\r\n") -> bytes:
    text = b""
    for name, data in fields:
        text += b'--XyZ\r\nContent-Disposition: form-data; name="%s"; filename="x"\r\n\r\n' % name.encode()
        text += data + b"\r\n"
    return text + b"--XyZ" + end


def read(body: bytes, cut: list[int] | None = None, kind: str = KIND) -> list[tuple[str, bytes]]:
    async def pieces() -> AsyncIterator[bytes]:
        places = [0, *(cut or []), len(body)]
        for start, end in itertools.pairwise(places):
            yield body[start:end]

    async def collected() -> list[tuple[str, bytes]]:
        found = []
        async for part in parts(kind, pieces()):
            found.append((part.name, b"".join([piece async for piece in part.data])))
        return found

    return asyncio.run(collected())


def test_parts_come_out_whole_however_they_are_cut() -> None:
    random.seed(5)
    hard = b"\r\n--XyY\r\n--Xy\r\r\n-" + os.urandom(3000) + b"\r\n--Xy"
    fields = [("options", b'{"a": 1}'), ("context", hard), ("empty", b"")]
    body = form(*fields)
    for _ in range(200):
        cut = sorted(random.sample(range(1, len(body)), random.randint(0, 40)))
        assert read(body, cut) == fields
    assert read(body, list(range(1, len(body)))) == fields


def test_what_comes_before_and_behind_is_left_out() -> None:
    assert read(b"preamble\r\n" + form(("a", b"1")) + b"epilogue" * 100) == [("a", b"1")]
    assert read(form(("a", b"1"), end=b"--")) == [("a", b"1")]
    assert read(form()) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x" * 100,
        b"x" * 200_000,
        form(("a", b"1"))[:-5],
        form(("a", b"1" * 1000))[:500],
        b"--XyZ\r\n\r\nno name\r\n--XyZ--\r\n",
        b"--XyZ\r\nX: " + b"y" * 100_000,
        b"--XyZ\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"--XyZjunk\r\n\r\n",
    ],
)
def test_a_malformed_form_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="invalid form"):
        read(body)


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary="])
def test_another_kind_of_body_is_refused(kind: str) -> None:
    with pytest.raises(HTTPException) as refused:
        read(form(("a", b"1")), kind=kind)
    assert refused.value.status_code == 415
