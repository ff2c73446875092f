"""Connections that cannot be kept open or filled without limit: headers have a deadline and a maximum size, and clients
that vanish are detected."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

from atoll.server.connections.vanished_clients import Watched

GONE = "gone"
CUT = "cut"
"""Key in `scope["state"]` of a function that ends the connection at once."""
_SWITCHING = 101
_HEADERS_S = 20.0
_MAX_BYTES = 64 << 10
_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class BoundedProtocol(Watched, HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits. The headers must be complete within `_HEADERS_S` from the first byte of a
    connection or request."""

    _deadline: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._await_headers()
        super().on_message_begin()
        self.scope["state"][CUT] = self.transport.abort

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_came()
        super().on_headers_complete()

    def handle_websocket_upgrade(self) -> None:
        self.unwatch()
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        if self._deadline is not None:  # also counts incomplete headers
            self._header_bytes += len(data) if len(data) < _MAX_BYTES else 0
            if self._header_bytes > 2 * _MAX_BYTES:
                self._refuse(_LARGE)
                return
        super().data_received(data)

    def _await_headers(self) -> None:
        self._headers_came()
        self._header_bytes = 0
        self._deadline = self.loop.call_later(_HEADERS_S, self._refuse, _SLOW)

    def _headers_came(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MAX_BYTES:
            self._refuse(_LARGE)

    def _refuse(self, answer: bytes) -> None:
        self._headers_came()
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()


class BoundedSocket(Watched, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol. It sets `scope["state"][GONE]` when the connection is lost, because code that is
    busy with one message does not ask for the next one and would not notice."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gone = asyncio.Event()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == _SWITCHING:
            self.scope["state"][GONE] = self._gone
            self.scope["state"][CUT] = self.transport.abort

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        super().connection_lost(exc)
