"""The HTTP client against a Docker engine that is broken, or was replaced by something hostile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from atoll.engines.docker.api import exchange as exchange_module
from atoll.engines.docker.api import http as http_module
from atoll.engines.docker.api.exchange import close
from atoll.engines.docker.api.http import Http, RefusedError
from atoll.errors import EngineError, EngineUnavailableError
from docker.scripted_engine import CHUNKED, CONTINUE, answering, following, whole

OK = b"HTTP/1.1 200 OK\r\n"
UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"


async def request(http: Http) -> object:
    return await http.raw("GET", "/x", timeout_s=4)


async def hijack(http: Http) -> object:
    return await http.hijack("/x", {})


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        OK + b"Content-Length: 5, 6\r\n\r\nhello",
        OK + b"Content-Length: +5\r\n\r\nhello",
        OK + b"Content-Length: -5\r\n\r\nhello",
        OK + b"Content-Length: 0x5\r\n\r\nhello",
        OK + b"Content-Length : 5\r\n\r\nhello",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"X\0Y: z\r\n\r\n",
        OK + b"no header\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 -20 OK\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        UPGRADED,
    ],
)
async def test_a_head_with_two_readings_is_refused(tmp_path: Path, answer: bytes) -> None:
    async with answering(tmp_path, answer, hold=True) as http:
        with pytest.raises(EngineUnavailableError, match="broke off its answer"):
            await request(http)


@pytest.mark.parametrize(
    "body",
    [
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"0_5\r\nhello\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhelloworld\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"f" * 21 + b"\r\nhello",
        b"5;" + b"x" * 200_000,
        b"f" * 200_000,
        b"0\r\n" + b"X: y\r\n" * 50_000,
        b"0\r\nno trailer\r\n\r\n",
    ],
    ids=lambda body: repr(body[:12]),
)
async def test_chunks_that_make_no_sense_are_refused(tmp_path: Path, body: bytes) -> None:
    async with answering(tmp_path, CHUNKED + body, hold=True) as http:
        with pytest.raises(EngineUnavailableError, match="broke off its answer"):
            await request(http)


WHOLE = [
    whole(b"hello"),
    CHUNKED + b"5\r\nhello\r\n0\r\nX: trailer\r\n\r\n",
    CONTINUE + b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + whole(b"hello"),
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 16\r\n\r\n" + b'{"message": "x"}',
]


@pytest.mark.parametrize("answer", WHOLE, ids=["length", "chunks", "interim", "refusal"])
async def test_an_answer_that_is_cut_off_anywhere_is_told(tmp_path: Path, answer: bytes) -> None:
    lengths = iter(range(len(answer)))

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer[: next(lengths)])

    async with following(tmp_path, script) as http:
        for length in range(len(answer)):
            with pytest.raises(EngineUnavailableError, match="broke off its answer"):
                assert await request(http), f"{length} of {len(answer)} bytes"


async def test_interim_answers_are_passed_over(tmp_path: Path) -> None:
    async with answering(tmp_path, WHOLE[2], hold=True) as http:
        assert await http.raw("GET", "/x") == b"hello"


def flooding(
    piece: bytes, start: bytes = b""
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(start)
        while True:
            writer.write(piece)
            await writer.drain()

    return script


@pytest.mark.parametrize("attempt", [request, hijack])
@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
        (OK, b"X: y\r\n"),
        (OK, b"X: " + b"y" * 8192),
        (OK, b"X: y\r\n "),
        (b"", b"\r\n"),
    ],
    ids=["interim answers", "headers", "a header", "folded headers", "empty lines"],
)
async def test_a_head_without_end_is_refused(
    tmp_path: Path, attempt: Callable[[Http], Awaitable[object]], start: bytes, piece: bytes
) -> None:
    async with following(tmp_path, flooding(piece, start)) as http:
        with pytest.raises(EngineUnavailableError, match="broke off its answer"):
            await attempt(http)


@pytest.mark.parametrize("start", [OK + b"\r\n", CHUNKED, b"HTTP/1.1 500 Internal Server Error\r\n\r\n"])
async def test_a_body_without_end_is_refused(tmp_path: Path, start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exchange_module, http_module):
        monkeypatch.setattr(module, "MAX_BODY", 1 << 20)
    piece = b"x" * 0x1000 if start != CHUNKED else b"1000\r\n" + b"x" * 0x1000 + b"\r\n"
    async with following(tmp_path, flooding(piece, start)) as http:
        with pytest.raises(EngineUnavailableError, match="broke off its answer"):
            await request(http)
        with pytest.raises(EngineUnavailableError, match="broke off its answer"):
            _ = [line async for line in http.lines("GET", "/x", query={}, headers={}, timeout_s=4)]


@pytest.mark.parametrize("head", [UPGRADED, OK + b"\r\n", CONTINUE + UPGRADED], ids=["101", "200", "100 and 101"])
async def test_what_follows_an_upgrade_is_the_stream(tmp_path: Path, head: bytes) -> None:
    """Whether it comes with the head or later, and whatever it looks like."""
    first, second = b"HTTP/1.1 200 OK\r\n\r\n0\r\n", b"\0\1\2" * 1000

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(head + first)
        assert await reader.readexactly(3) == b"ask"
        writer.write(second)

    async with following(tmp_path, script) as http:
        reader, writer = await http.hijack("/x", {})
        try:
            assert await reader.readexactly(len(first)) == first
            writer.write(b"ask")
            assert await reader.read(-1) == second
        finally:
            await close(writer)


@pytest.mark.parametrize(
    "answer",
    [
        whole(b"hello"),
        CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\n\r\n",
        UPGRADED.replace(b"\r\n", b"\n") + b"x\r\n\r\n",
    ],
)
async def test_what_is_no_upgrade_is_no_stream(tmp_path: Path, answer: bytes) -> None:
    async with answering(tmp_path, answer, hold=True) as http:
        with pytest.raises(EngineUnavailableError, match="broke off its answer"):
            await hijack(http)


async def test_a_refused_upgrade_carries_the_reason(tmp_path: Path) -> None:
    async with answering(tmp_path, whole(b'{"message": "it is paused"}', "409 Conflict"), hold=True) as http:
        with pytest.raises(RefusedError, match="it is paused"):
            await hijack(http)


@pytest.mark.parametrize("text", [b'{"error": "x"}', b"[" * 100_000, b'{"message": {}}', b"\xff\xfe", b"null", b""])
async def test_a_refusal_in_any_form_is_a_refusal(tmp_path: Path, text: bytes) -> None:
    async with answering(tmp_path, whole(text, "500 Internal Server Error")) as http:
        with pytest.raises(RefusedError) as caught:
            await request(http)
        assert caught.value.status == 500
        assert len(caught.value.message) <= 2100


@pytest.mark.parametrize("name", ["a\r\nX-Smuggled: 1", "a b", "a\nb", "\xe9", "\0"])
async def test_a_name_from_the_engine_cannot_change_the_next_request(tmp_path: Path, name: str) -> None:
    heads = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(whole(b"{}"))

    async with following(tmp_path, script) as http:
        with pytest.raises(EngineError, match="a name that does not fit"):
            await http.call("GET", f"/exec/{name}/json")
        assert await http.call("GET", "/exec/a/json") == {}
    assert len(heads) == 1


@pytest.mark.parametrize("start", [b"", CHUNKED + b"5\r\nhel"], ids=["before the answer", "in the answer"])
async def test_who_is_cancelled_hangs_up(tmp_path: Path, start: bytes) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(start)
        await writer.drain()
        asked.set()
        assert await reader.read(1) == b""
        gone.set()

    async with following(tmp_path, script) as http:
        asking = asyncio.create_task(request(http))
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(10):
            await gone.wait()


async def test_an_archive_that_cannot_be_read_is_told_at_once(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"
        raise OSError("the disk is broken")

    async with answering(tmp_path, b"", before=CONTINUE, until=b"never sent") as http:
        with pytest.raises((OSError, EngineUnavailableError), match="the disk is broken"):
            _ = [line async for line in http.send("/x", {}, pieces(), 20)]
