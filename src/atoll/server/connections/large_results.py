"""Large answers as JSON, encoded piece by piece while they are sent.

Encoding one at once would need many times its memory, because a zero byte becomes six characters, and it would block
the event loop. So only small answers are encoded at once. Others are sent in pieces, and other users get their turn
between two pieces, however many answers one user waits for.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Literal, TypeVar

from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from atoll.model import ExecutionResult
from atoll.server.connections.streaming import Download
from atoll.workers import Shares

T = TypeVar("T")
Encoding = Literal["utf-8", "base64"]
_PIECE = 24 << 10
"""Divisible by three, so that pieces of base64 can be joined."""
_ITEMS = 50
_turns = Shares(1024, 1)
"""In each round of the event loop one piece of one answer of each user is encoded."""


def execution(result: ExecutionResult, encoding: Encoding) -> Response:
    """Return the response that `ExecResult` describes."""
    rest = {
        "exit_code": result.exit_code,
        "exitCode": result.exit_code,
        "error": result.error,
        "cause": result.cause,
        "duration_s": result.duration_s,
        "truncated": result.truncated,
        "cpu_s": result.cpu_s,
        "max_rss_bytes": result.max_rss_bytes,
    }

    def pieces() -> Iterator[str]:
        yield f'{{"success":{json.dumps(result.success)}'
        for name, data in (("stdout", result.stdout_bytes), ("stderr", result.stderr_bytes)):
            yield f',"{name}":"'
            yield from (_base64 if encoding == "base64" else _text)(data)
            yield '"'
        yield f",{json.dumps(rest, separators=(',', ':'))[1:]}"

    size = len(result.stdout_bytes) + len(result.stderr_bytes)
    return _response(pieces(), size <= _PIECE)


def listing(items: Sequence[T], shown: Callable[[T], BaseModel]) -> Response:
    """Return a list of models, which are created as they are sent."""
    return _response(_listed(items, shown), len(items) <= _ITEMS)


def page(items: Sequence[T], shown: Callable[[T], BaseModel], next_page_id: str | None) -> Response:
    """Return one page of models, which are created as they are sent."""

    def pieces() -> Iterator[str]:
        yield '{"items":'
        yield from _listed(items, shown)
        yield f',"next_page_id":{json.dumps(next_page_id)}}}'

    return _response(pieces(), len(items) <= _ITEMS)


def _listed(items: Sequence[T], shown: Callable[[T], BaseModel]) -> Iterator[str]:
    for start in range(0, len(items), _ITEMS):
        models = (shown(item).model_dump_json() for item in items[start : start + _ITEMS])
        yield ("," if start else "[") + ",".join(models)
    yield "]" if items else "[]"


def _response(pieces: Iterator[str], small: bool) -> Response:
    if small:
        return Response("".join(pieces), media_type=JSONResponse.media_type)
    return Download(_in_turns(pieces), media_type=JSONResponse.media_type)


async def _in_turns(pieces: Iterator[str]) -> AsyncGenerator[bytes, None]:
    while True:
        async with _turns.slot():
            piece = next(pieces, None)
            await asyncio.sleep(0)
        if piece is None:
            return
        yield piece.encode()


def _text(data: bytes) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    view = memoryview(data)
    for start in range(0, len(data), _PIECE):
        yield _escaped(decoder.decode(view[start : start + _PIECE]))
    yield _escaped(decoder.decode(b"", True))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _base64(data: bytes) -> Iterator[str]:
    view = memoryview(data)
    for start in range(0, len(data), _PIECE):
        yield base64.b64encode(view[start : start + _PIECE]).decode()
