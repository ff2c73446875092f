"""The HTTP client against a server that misbehaves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.engines.docker.api import http as http_module
from atoll.engines.docker.api.endpoint import Endpoint
from atoll.engines.docker.api.http import Http, RefusedError
from atoll.errors import EngineUnavailableError
from docker.scripted_engine import CHUNKED, CONTINUE, answering, whole


async def test_a_body_of_known_length(tmp_path: Path) -> None:
    async with answering(tmp_path, whole(b'{"a": 1}'), hold=True) as http:
        assert await http.call("GET", "/x") == {"a": 1}


async def test_a_body_in_chunks(tmp_path: Path) -> None:
    async with answering(tmp_path, CHUNKED + b'3\r\n{"a\r\n6;x=y\r\n": [1]\r\n1\r\n}\r\n0\r\n\r\n', hold=True) as http:
        assert await http.call("GET", "/x") == {"a": [1]}


async def test_a_body_until_the_end_of_the_connection(tmp_path: Path) -> None:
    async with answering(tmp_path, b"HTTP/1.1 200 OK\r\n\r\nhello") as http:
        assert await http.raw("GET", "/x") == b"hello"


async def test_no_body_is_none(tmp_path: Path) -> None:
    async with answering(tmp_path, b"HTTP/1.1 204 No Content\r\n\r\n", hold=True) as http:
        assert await http.call("POST", "/x", body={"b": 2}) is None


async def test_a_head_has_no_body_whatever_its_headers_say(tmp_path: Path) -> None:
    async with answering(tmp_path, b"HTTP/1.1 404 Not Found\r\nContent-Length: 100\r\n\r\n") as http:
        with pytest.raises(RefusedError) as caught:
            await http.call("HEAD", "/x")
        assert caught.value.status == 404


async def test_a_refusal_carries_its_reason_on_one_line(tmp_path: Path) -> None:
    async with answering(tmp_path, whole(b'{"message": "no\\n\\u001b[31msuch thing"}', "404 Not Found")) as http:
        with pytest.raises(RefusedError) as caught:
            await http.call("GET", "/x")
        assert (caught.value.status, caught.value.message) == (404, "no  [31msuch thing")


REFUSED = whole(b'{"message": "no space left"}', "500 Internal Server Error")


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b"x" * 65536


@pytest.mark.parametrize("until", [b"", b"xxx"], ids=["at once", "in the middle"])
async def test_a_refused_archive_carries_the_reason(tmp_path: Path, until: bytes) -> None:
    async with answering(tmp_path, REFUSED, before=CONTINUE, until=until, hold=bool(until)) as http:
        with pytest.raises(RefusedError, match="no space left"):
            _ = [line async for line in http.send("/x", {}, endless(), 20)]


async def test_an_archive_is_sent_in_chunks(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"one", b"", b"two"):
            yield piece

    sent = b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    async with answering(tmp_path, whole(b'{"a": 1}\n{"a": 2}\n'), before=CONTINUE, until=sent) as http:
        assert [line["a"] async for line in http.send("/x", {}, pieces(), 20)] == [1, 2]


async def test_lines_come_one_by_one(tmp_path: Path) -> None:
    body = CHUNKED + b'a\r\n{"a": 1}\n{\r\n8\r\n"a": 2}\n\r\n0\r\n\r\n'
    async with answering(tmp_path, body) as http:
        lines = http.lines("POST", "/x", query={"q": "a b"}, headers={}, timeout_s=5)
        assert [line["a"] async for line in lines] == [1, 2]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        CHUNKED + b"ffffffffff\r\n",
        CHUNKED + b"zz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 200_000,
    ],
)
async def test_a_broken_answer_is_told(tmp_path: Path, answer: bytes) -> None:
    async with answering(tmp_path, answer) as http:
        with pytest.raises(EngineUnavailableError) as caught:
            await http.call("GET", "/x")
        assert caught.value.hint


async def test_a_silent_engine_is_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "QUICK_S", 0.2)
    async with answering(tmp_path, b"", hold=True) as http:
        with pytest.raises(EngineUnavailableError, match="does not answer"):
            await http.call("GET", "/x", timeout_s=0.2)


async def test_no_engine_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailableError, match="there is no Docker engine") as caught:
        await Http(Endpoint(path=str(tmp_path / "nothing"))).call("GET", "/x")
    assert "systemctl start docker" in str(caught.value.hint)
    with pytest.raises(EngineUnavailableError):
        await Http(Endpoint(host="127.0.0.1", port=1)).call("GET", "/x")
