"""WebSockets into a sandbox: a terminal, and the byte stream of its agent."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, WebSocket, WebSocketDisconnect

from atoll.cancellation import until_first
from atoll.errors import SandboxError
from atoll.manager import ManagedSandbox
from atoll.sandbox.terminal import AsyncTerminal
from atoll.server.connections.bounded_protocol import GONE
from atoll.server.middleware.auth import admit, services_of, subprotocol
from atoll.server.problems import respond
from atoll.service import Scope
from atoll.tracing import span
from atoll.two_way_copy import SocketEnd, copy_until_one_ends

T = TypeVar("T")
router = APIRouter(prefix="/sandboxes/{sandbox_id}", tags=["sockets"])
_MAX_TYPED_BYTES = 1 << 20
_ENDED = 1000
_FAILED = 1011
_EXPECTED = (OSError, WebSocketDisconnect, SandboxError)


@router.websocket("/terminal")
async def terminal(
    websocket: WebSocket,
    sandbox_id: str,
    rows: Annotated[int, Query(ge=1, le=1000)] = 24,
    columns: Annotated[int, Query(ge=1, le=1000)] = 80,
    command: Annotated[str | None, Query(max_length=4096)] = None,
) -> None:
    """Run a program (default: a shell) on a terminal of its own.

    Binary messages are what is typed and what is shown. Text messages are JSON: `{"resize": [rows, columns]}` from the
    client, `{"exit": code}` at the end.
    """

    async def work(sandbox: ManagedSandbox, opened: AsyncTerminal) -> None:
        await websocket.accept(subprotocol(websocket))
        with services_of(websocket).metrics.stream("terminal"):
            try:
                async with sandbox.use():
                    showing = (_show(websocket, opened), _type(websocket, opened), _gone(websocket))
                    await until_first(*showing, expected=_EXPECTED)
            finally:
                await opened.kill()

    await _serve(
        websocket, sandbox_id, lambda sandbox: sandbox.open_terminal(command, rows=rows, columns=columns), work
    )


@router.websocket("/agent")
async def agent(websocket: WebSocket, sandbox_id: str) -> None:
    """Carry the byte stream to the sandbox's agent, which the SDK speaks, as binary messages. Message boundaries mean
    nothing."""

    async def work(sandbox: ManagedSandbox, stream: socket.socket) -> None:
        with contextlib.closing(stream), services_of(websocket).metrics.stream("agent"):
            await websocket.accept(subprotocol(websocket))
            copying = copy_until_one_ends(_ClientEnd(websocket), _AgentEnd(stream, sandbox), expected=_EXPECTED)
            await until_first(copying, _gone(websocket), expected=_EXPECTED)
            with contextlib.suppress(RuntimeError):
                await websocket.close(_ENDED)

    await _serve(websocket, sandbox_id, lambda sandbox: sandbox.connect_agent(), work)


async def _serve(
    websocket: WebSocket,
    sandbox_id: str,
    open: Callable[[ManagedSandbox], Awaitable[T]],
    work: Callable[[ManagedSandbox, T], Awaitable[None]],
) -> None:
    """Open something in the sandbox for the client, and work with it until the client is gone. A client that may not,
    or for whom it cannot be opened, is denied."""
    caller = await admit(websocket, Scope.USE)
    if caller is None:
        return
    with contextlib.suppress(WebSocketDisconnect):
        try:
            with span("service.open_stream", user_id=caller.user_id) as current:
                sandbox = await services_of(websocket).sandboxes.sandbox(caller, sandbox_id)
                current.set(sandbox_id=sandbox.id)
                opened = await open(sandbox)
        except (SandboxError, OSError, ValueError) as error:
            await websocket.send_denial_response(respond(error))
            return
        await work(sandbox, opened)


async def _gone(websocket: WebSocket) -> None:
    """Return when the connection is lost, even while a message is still being passed on."""
    await websocket.scope["state"][GONE].wait()


async def _show(websocket: WebSocket, opened: AsyncTerminal) -> None:
    async for data in opened:
        await websocket.send_bytes(data)
    await websocket.send_text(json.dumps({"exit": await opened.wait()}))
    await websocket.close(_ENDED)


async def _type(websocket: WebSocket, opened: AsyncTerminal) -> None:
    """Pass on what is typed until the client disconnects, even while the program does not read it: up to a limit, it is
    kept."""
    waiting: collections.deque[Mapping[str, Any]] = collections.deque()
    changed = asyncio.Condition()

    def is_full() -> bool:
        return sum(len(message.get("bytes") or b"") for message in waiting) >= _MAX_TYPED_BYTES

    async def hear() -> None:
        while (message := await websocket.receive())["type"] != "websocket.disconnect":
            async with changed:
                await changed.wait_for(lambda: not is_full())
                waiting.append(message)
                changed.notify_all()

    async def pass_on() -> None:
        while True:
            async with changed:
                await changed.wait_for(lambda: waiting)
                message = waiting[0]
            if not await _typed(websocket, opened, message):
                return
            async with changed:
                waiting.popleft()
                changed.notify_all()

    await until_first(hear(), pass_on(), expected=_EXPECTED)


async def _typed(websocket: WebSocket, opened: AsyncTerminal, message: Mapping[str, Any]) -> bool:
    """Pass on one message. Returns False if it was invalid, after closing the connection."""
    if (data := message.get("bytes")) is not None:
        with contextlib.suppress(BrokenPipeError):
            await opened.write(data)
        return True
    try:
        rows, columns = json.loads(message["text"])["resize"]
        await opened.resize(int(rows), int(columns))
    except (ValueError, KeyError, TypeError):
        await websocket.close(_FAILED, "a text message is {'resize': [rows, columns]}")
        return False
    return True


class _ClientEnd:
    """The client's WebSocket, whose binary messages are bytes of one stream."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    async def read(self) -> bytes:
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            if data := message.get("bytes"):
                return bytes(data)
        return b""

    async def write(self, data: bytes) -> None:
        await self._websocket.send_bytes(data)

    async def write_eof(self) -> None:
        await self._websocket.close(_ENDED)


class _AgentEnd(SocketEnd):
    def __init__(self, stream: socket.socket, sandbox: ManagedSandbox) -> None:
        super().__init__(stream)
        self._sandbox = sandbox

    async def write(self, data: bytes) -> None:
        async with self._sandbox.use():  # resumes a paused sandbox
            await super().write(data)
