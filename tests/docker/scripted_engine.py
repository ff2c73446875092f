"""A server in place of a Docker engine that says what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

from atoll.engines.docker.api.endpoint import Endpoint
from atoll.engines.docker.api.http import Http

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def following(folder: Path, script: Script) -> AsyncIterator[Http]:
    """A server that does this on every connection, and hangs up at the end of it."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await script(reader, writer)
        finally:
            writer.close()

    path = folder / "sock"
    server = await asyncio.start_unix_server(serve, path)
    try:
        yield Http(Endpoint(path=str(path)))
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()


def answering(
    folder: Path, answer: bytes, *, hold: bool = False, before: bytes = b"", until: bytes = b""
) -> AbstractAsyncContextManager[Http]:
    """A server that reads a request, says this, and hangs up unless it is to hold the line. It may say something
    `before`, and read `until` something comes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if until:
            writer.write(before)
            await reader.readuntil(until)
        writer.write(answer)
        await writer.drain()
        if hold:
            await asyncio.Event().wait()

    return following(folder, script)


def whole(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
