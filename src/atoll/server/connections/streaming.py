"""Streamed answers: a line of JSON for each event, or server-sent events for clients that ask for them.

A client that disconnects is noticed at once, even while nothing happens, and the source of its stream is then closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from atoll.cancellation import until_first
from atoll.server.problems import of

T = TypeVar("T")
Happening = Mapping[str, object]
_QUIET_S = 15.0
_SHORT_S = 0.02
NDJSON = "application/x-ndjson"
SSE = "text/event-stream"


class EventStream(Response):
    """A stream of events. An error after the first line is sent as the last line, of type `error`."""

    def __init__(
        self,
        request: Request,
        events: AsyncGenerator[Happening, None],
        *,
        on_close: Callable[[], Awaitable[None]] | None = None,
        status_code: int = 200,
    ) -> None:
        self._sse = SSE in request.headers.get("accept", "")
        self._events = events
        self._on_close = on_close
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(None, status_code, headers, SSE if self._sse else NDJSON)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_first(self._send(send), _gone(receive), expected=(OSError,))
        finally:
            with contextlib.suppress(Exception):
                await self._events.aclose()
            if self._on_close is not None:
                await self._on_close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        upcoming: asyncio.Future[Happening] | None = None
        try:
            while True:
                if upcoming is None:
                    upcoming = asyncio.ensure_future(anext(self._events))
                done, _ = await asyncio.wait({upcoming}, timeout=_QUIET_S)
                if not done:
                    await send(_body(self._line({"type": "heartbeat"})))
                    continue
                finished, upcoming = upcoming, None
                try:
                    line = self._line(finished.result())
                except StopAsyncIteration:
                    break
                except Exception as error:
                    found = of(error).model_dump(exclude_none=True)
                    await send(_body(self._line({**found, "type": "error"})))
                    break
                await send(_body(line))
        finally:
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.wait({upcoming})
        await send({"type": "http.response.body", "body": b""})

    def _line(self, event: Happening) -> bytes:
        data = json.dumps(event, separators=(",", ":"))
        if not self._sse:
            return data.encode() + b"\n"
        id = f"id: {event['id']}\n" if "id" in event else ""
        return f"{id}event: {event['type']}\ndata: {data}\n\n".encode()


class Download(StreamingResponse):
    """Pieces of a file. Their source is closed when the answer ends, also if the client disconnects in the middle."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], status_code: int = 200, **options: Any) -> None:
        super().__init__(pieces, status_code, **options)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._pieces):
            await super().__call__(scope, receive, send)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work. The work is cancelled when the client disconnects, as nobody would see its
    result."""
    await request.body()
    return await while_there(request, work)


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """As `while_connected`, for a request whose body has been read: only then is the next message the end of the
    connection."""
    working = asyncio.create_task(work)
    waiting = {working}
    try:
        await asyncio.wait(waiting, timeout=_SHORT_S)
        if not working.done():  # watching the client costs as much as a short piece of work
            waiting.add(asyncio.create_task(_gone(request.receive)))  # type: ignore[arg-type]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        if len(waiting) > 1 or not working.done():
            await asyncio.gather(*waiting, return_exceptions=True)
    if working.cancelled():
        raise ConnectionResetError("the client disconnected")
    return working.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(data: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": True}
