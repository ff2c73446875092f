"""WebSockets to programs inside. The server speaks the protocol with each side, so nothing malformed passes in either
direction; only whole messages of bounded size are passed on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

from starlette.responses import PlainTextResponse, Response
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Response as Answer
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from atoll.errors import SandboxError
from atoll.guest.port_streams import AsyncPortStream
from atoll.server.middleware.auth import BEARER, subprotocol
from atoll.server.ports.port_request import PortRequest
from atoll.server.problems import respond
from atoll.server.services import Services
from atoll.service import Caller, RateLimitedError

_MAX_FOR_ONE = 128
_MAX_MESSAGE_BYTES = 4 << 20
_PIECE = 65_536
_ANSWER_S = 30.0
_CLOSE_S = 5.0
_GOING_AWAY, _INVALID, _FAILED = 1001, 1007, 1011
_NO_CODE = 1005


async def bridge(websocket: WebSocket, caller: Caller, services: Services, wanted: PortRequest) -> None:
    """Pass messages on until either side closes the WebSocket, the sandbox ends, or the right to it ends."""
    try:
        await services.sandboxes.ports.need_exposed(caller, wanted.sandbox_id, wanted.port)
        sandbox = await services.sandboxes.sandbox(caller, wanted.sandbox_id)
        async with AsyncExitStack() as opened:
            opened.enter_context(_counted(services, wanted.sandbox_id))
            await opened.enter_async_context(sandbox.use())
            stream = await opened.enter_async_context(await sandbox.connect_port(wanted.port))
            inside = Inside(stream, wanted, websocket)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    refused = await inside.shake_hands()
            except TimeoutError:
                refused = PlainTextResponse(f"port {wanted.port} did not answer in time\n", 504)
            if refused is not None:
                await websocket.send_denial_response(refused)
                return
            await websocket.accept(inside.subprotocol or subprotocol(websocket))
            opened.enter_context(services.metrics.stream("port"))
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                await _carry(websocket, inside, wanted)
    except OSError as error:
        text = f"nothing listens on port {wanted.port} of sandbox {wanted.sandbox_id}: {error.strerror or error}\n"
        await websocket.send_denial_response(PlainTextResponse(text, 502))
    except SandboxError as error:
        await websocket.send_denial_response(respond(error))


async def _carry(websocket: WebSocket, inside: Inside, wanted: PortRequest) -> None:
    left = None if wanted.until is None else max(0.0, wanted.until - time.time())
    code, reason = _GOING_AWAY, "the link has expired"
    outwards = asyncio.create_task(_outwards(websocket, inside))
    inwards = asyncio.create_task(_inwards(websocket, inside))
    try:
        done, _ = await asyncio.wait((outwards, inwards), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if outwards in done:
            code, reason = outwards.result()
        elif inwards in done:
            inwards.result()
            with contextlib.suppress(TimeoutError):  # for the answer to the close frame that was sent inside
                await asyncio.wait_for(outwards, _CLOSE_S)
            return
    finally:
        for task in (outwards, inwards):
            task.cancel()
        await asyncio.gather(outwards, inwards, return_exceptions=True)
    await websocket.close(code, reason)


async def _outwards(websocket: WebSocket, inside: Inside) -> tuple[int, str]:
    """Pass messages on to the client. Returns the code and the reason of the end."""
    try:
        async for opcode, data in inside:
            if opcode is Opcode.TEXT:
                await websocket.send_text(data.decode())
            else:
                await websocket.send_bytes(data)
    except UnicodeDecodeError:
        return _INVALID, "invalid UTF-8 in a text message"
    except (OSError, SandboxError):
        return _GOING_AWAY, "the sandbox has ended"
    return inside.ending


async def _inwards(websocket: WebSocket, inside: Inside) -> None:
    try:
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                await inside.close(message.get("code") or _NO_CODE, message.get("reason") or "")
                return
            await inside.send(message.get("text"), message.get("bytes"))
    except (OSError, SandboxError):
        await asyncio.Event().wait()  # the other direction reports what happened


class Inside:
    """The client's side of a WebSocket to a port inside."""

    def __init__(self, stream: AsyncPortStream, wanted: PortRequest, websocket: WebSocket) -> None:
        self._stream = stream
        path, _, query = wanted.target.decode("latin-1").partition("?")
        offered = [name for name in websocket.scope.get("subprotocols", []) if not name.startswith(BEARER)]
        self._protocol = ClientProtocol(
            WebSocketURI(False, "localhost", wanted.port, path, query),
            subprotocols=[Subprotocol(name) for name in offered] or None,
            max_size=_MAX_MESSAGE_BYTES,
        )
        self._headers = wanted.inwards(websocket.headers.raw)
        self._turn = asyncio.Lock()

    @property
    def subprotocol(self) -> str | None:
        return self._protocol.subprotocol

    async def shake_hands(self) -> Response | None:
        """Open the WebSocket. Returns None on success, otherwise the response to send to the client."""
        request = self._protocol.connect()
        del request.headers["Host"]
        for name, value in self._headers:
            request.headers[name.decode("latin-1")] = value.decode("latin-1")
        self._protocol.send_request(request)
        await self._flush()
        while not (events := self._protocol.events_received()):
            data = await self._stream.read(_PIECE)
            if not data:
                self._protocol.receive_eof()
                if not (events := self._protocol.events_received()):
                    return PlainTextResponse("the connection was closed before an answer\n", 502)
                break
            self._protocol.receive_data(data)
        self._early = events[1:]
        error = self._protocol.handshake_exc
        if error is None and isinstance(events[0], Answer):
            return None
        status = error.response.status_code if isinstance(error, InvalidStatus) else 502
        return PlainTextResponse(
            f"the program on this port accepts no WebSocket: {error}\n", status if 400 <= status < 600 else 502
        )

    @property
    def ending(self) -> tuple[int, str]:
        """The code and the reason of the end, as a close frame may carry them."""
        said = self._protocol.close_rcvd or self._protocol.close_sent
        code, reason = (said.code, said.reason) if said is not None else (0, "")
        if code == _NO_CODE:
            return 1000, ""
        usable = code in (1000, 1001, 1002, 1003) or 1007 <= code <= 1014 or 3000 <= code <= 4999
        return (code, reason) if usable else (_FAILED, "the program on this port gave no valid reason")

    async def send(self, text: str | None, data: bytes | None) -> None:
        if text is not None:
            self._protocol.send_text(text.encode())
        elif data is not None:
            self._protocol.send_binary(data)
        await self._flush()

    async def close(self, code: int, reason: str) -> None:
        if self._protocol.state.name == "OPEN":
            usable = code in (1000, 1001) or 3000 <= code <= 4999
            self._protocol.send_close(code if usable else _GOING_AWAY, reason if usable else "")
            await self._flush()

    async def __aiter__(self) -> AsyncIterator[tuple[Opcode, bytes]]:
        """Yield whole messages until the end."""
        kind, parts = Opcode.BINARY, bytearray()
        frames = self._early
        while True:
            for frame in frames:
                if not isinstance(frame, Frame) or frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                    continue
                kind = kind if frame.opcode is Opcode.CONT else frame.opcode
                parts += frame.data
                if frame.fin:
                    yield kind, bytes(parts)
                    parts.clear()
            await self._flush()
            if self._protocol.close_rcvd is not None or self._protocol.parser_exc is not None:
                return
            data = await self._stream.read(_PIECE)
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            frames = self._protocol.events_received()
            if not data and not frames:
                return

    async def _flush(self) -> None:
        async with self._turn:
            data = b"".join(self._protocol.data_to_send())
            if data:
                await self._stream.write(data)


@contextlib.contextmanager
def _counted(services: Services, sandbox_id: str) -> Iterator[None]:
    count = services.port_sockets
    if count.get(sandbox_id, 0) >= _MAX_FOR_ONE:
        raise RateLimitedError(f"more than {_MAX_FOR_ONE} WebSockets to one sandbox", retry_after_s=1)
    count[sandbox_id] = count.get(sandbox_id, 0) + 1
    try:
        yield
    finally:
        count[sandbox_id] -= 1
        if not count[sandbox_id]:
            del count[sandbox_id]
