"""Serves HTTP on one connection: each request is parsed, checked against the policy and written again. All requests
must be for the host of the first one."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from atoll.network.gateway import http1
from atoll.network.gateway.http1 import BadRequestError, Request
from atoll.network.gateway.member import Member, TcpFlow
from atoll.network.gateway.relay import Pump, relay, settle
from atoll.network.refusals import RefusedError
from atoll.printable import printable

_HEAD_S = 10.0
_IDLE_S = 300.0
_PIECE = 64 * 1024
_MAX_LINE = 4096
_ECHOING = (b"TRACE", b"TRACK")

Reach = Callable[[Member, TcpFlow, str], Awaitable[None]]


class UnreachedError(ConnectionError):
    """The host of an allowed request could not be reached."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.said = http1.refusal("502 Bad Gateway", text)


class Requests:
    def __init__(self, reach: Reach, member: Member, flow: TcpFlow, start: bytes, *, tls_name: str = "") -> None:
        """`tls_name` is the server name that the client gave in TLS. Empty: the connection is not encrypted."""
        self._reach, self._member, self._flow = reach, member, flow
        self._loop = asyncio.get_running_loop()
        self._buffer = start
        self._host = tls_name
        self._tls = bool(tls_name)

    async def serve(self) -> None:
        request = await self._next(_HEAD_S)
        if request is None:
            return
        host = self._judged(request)
        if self._tls and host != self._host:
            raise self._refused(f"the connection was made for {self._host}", host)
        self._host = host
        await self._reached()
        far = self._far()
        if request.upgrades:
            if await self._upgraded(request):
                return
        else:
            await self._send(request)
        over: asyncio.Future[BaseException | None] = self._loop.create_future()
        answers = Pump(far, self._flow.near, self._member.share, functools.partial(settle, over))
        asking = asyncio.create_task(self._further())
        try:
            await asyncio.wait((over, asking), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()  # raises its exception, if any
                with suppress(OSError):
                    far.shutdown(socket.SHUT_WR)
                await over
        finally:
            asking.cancel()
            answers.stop()
            with suppress(asyncio.CancelledError, Exception):
                await asking

    async def _further(self) -> None:
        while (request := await self._next(_IDLE_S)) is not None:
            host = self._judged(request)
            if host != self._host:
                # Two hosts can share an address, but requests to another name may not be allowed there.
                raise self._refused(f"the connection was made for {self._host}", host)
            request.upgrades = False
            await self._send(request)

    async def _next(self, seconds: float) -> Request | None:
        try:
            async with asyncio.timeout(seconds):
                while not self._buffer:
                    if not await self._more():
                        return None
            async with asyncio.timeout(_HEAD_S):
                while b"\r\n\r\n" not in self._buffer:
                    if len(self._buffer) > http1.MAX_HEAD or not await self._more():
                        raise self._refused("the request is cut short or too long", "", "400 Bad Request")
        except TimeoutError:
            return None
        end = self._buffer.index(b"\r\n\r\n") + 4
        head, self._buffer = self._buffer[:end], self._buffer[end:]
        try:
            return http1.read_request(head)
        except BadRequestError as error:
            raise self._refused(str(error), "", "400 Bad Request") from None

    def _judged(self, request: Request) -> str:
        """Return the host of a request if the policy allows it, and add headers to it. Raises RefusedError."""
        try:
            host = request.destination()
        except ValueError as error:
            raise self._refused(f"Host: {error}", request.host, "400 Bad Request") from None
        if not isinstance(host, str):
            raise self._refused("a rule for its address would have to allow it", str(host))
        if request.port is not None and request.port != self._flow.port:
            raise self._refused("the Host names another port", host, "400 Bad Request")
        decision = self._member.evaluator.name(host, self._flow.port, "web")
        if not decision:
            raise self._refused(decision.rule, host)
        injection = self._member.injection(host, tls=self._tls)
        if injection is not None:
            if request.method in _ECHOING:
                raise self._refused(f"{request.method.decode()} would show the headers that are added", host)
            request.added = [(name.encode(), value.encode()) for name, value in injection.headers.items()]
        return host

    async def _reached(self) -> None:
        try:
            await self._reach(self._member, self._flow, self._host)
        except RefusedError as error:
            raise self._refused(error.rule, self._host) from None
        except (OSError, TimeoutError) as error:
            text = f"atoll: {self._host} cannot be reached: {error or 'no answer in time'}"
            raise UnreachedError(text) from error

    def _far(self) -> socket.socket:
        assert self._flow.far is not None
        return self._flow.far

    async def _send(self, request: Request) -> None:
        await self._loop.sock_sendall(self._far(), request.write(keep_upgrade=False))
        if request.chunked:
            await self._chunks()
        elif request.length:
            await self._body(request.length)

    async def _upgraded(self, request: Request) -> bool:
        """Send a WebSocket upgrade. If the server accepts it, relay everything that follows unread and return True at
        the end. Otherwise return False: it was an ordinary request."""
        if request.length or request.chunked:
            raise self._refused("an upgrade must not have a body", self._host, "400 Bad Request")
        far, near = self._far(), self._flow.near
        await self._loop.sock_sendall(far, request.write(keep_upgrade=True))
        head = b""
        async with asyncio.timeout(_IDLE_S):
            while b"\r\n\r\n" not in head:
                piece = await self._loop.sock_recv(far, _PIECE)
                head += piece
                if not piece or len(head) > http1.MAX_HEAD:
                    raise ConnectionError("the server's answer is cut short or too long")
        await self._loop.sock_sendall(near, head)
        if not head.startswith((b"HTTP/1.1 101 ", b"HTTP/1.0 101 ")):
            return False
        if self._buffer:
            await self._loop.sock_sendall(far, self._buffer)
        await relay(near, far, self._member.share)
        return True

    async def _body(self, length: int) -> None:
        while length:
            piece, self._buffer = self._buffer[:length], self._buffer[length:]
            if piece:
                length -= len(piece)
                await self._loop.sock_sendall(self._far(), piece)
            elif not await self._more():
                raise ConnectionError("a request is cut short")

    async def _chunks(self) -> None:
        """Send a chunked body. Chunk sizes are written again without extensions, and trailers are left out."""
        while True:
            try:
                size = http1.read_chunk_size(await self._line())
            except BadRequestError as error:
                raise self._refused(str(error), self._host, "400 Bad Request") from None
            await self._loop.sock_sendall(self._far(), b"%x\r\n" % size)
            if not size:
                break
            await self._body(size)
            if await self._line():
                raise self._refused("a chunk is malformed", self._host, "400 Bad Request")
            await self._loop.sock_sendall(self._far(), b"\r\n")
        while await self._line():
            pass
        await self._loop.sock_sendall(self._far(), b"\r\n")

    async def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            if len(self._buffer) > _MAX_LINE or not await self._more():
                raise self._refused("a chunk is malformed", self._host, "400 Bad Request")
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    async def _more(self) -> bool:
        piece = await self._loop.sock_recv(self._flow.near, _PIECE)
        self._buffer += piece
        await self._member.share.passed(len(piece))
        return bool(piece)

    def _refused(self, rule: str, name: str, status: str = "403 Forbidden") -> RefusedError:
        error = RefusedError(rule, name, "web")
        shown = name or f"{self._flow.address}"
        scheme = "https" if self._tls else "http"
        text = f"atoll: {scheme}://{shown}:{self._flow.port} is refused by this sandbox's network policy: {rule}"
        error.said = http1.refusal(status, printable(text, instead="?"))
        return error
