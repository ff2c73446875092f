"""Detect clients that vanish: silently, or with a notice that goes unseen because nothing is being read from them.

There are three signs. The kernel probes connections on which nothing happens. Data that is not acknowledged for
`SILENT_S` is not arriving. And the state of a connection shows that the client has hung up, even while reading from it
is put off. A client that is connected but does not read what waits for it is given up after `slow_s`, the time that a
client also has to send something.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

SILENT_S = 3.0
_LOOK_EVERY_S = 0.5
_HUNG_UP = frozenset((7, 8, 9, 11))
"""CLOSE, CLOSE_WAIT, LAST_ACK, CLOSING, as the kernel numbers the states."""
_LOOKS = 2
"""How many checks in a row must agree. At the first one, the client's last data may still be on its way."""
_INFO = struct.Struct("=B23xI28xI60xQ")
"""The head of `struct tcp_info`: state, …, unacknowledged segments, …, ms since the last acknowledgement, …,
acknowledged bytes."""


def probe_idle(sock: socket.socket) -> None:
    """Enable keep-alive probes on a listening socket. Connections that it accepts inherit the setting."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


class Watched:
    """Mixin for uvicorn's protocols that cuts a connection whose client has vanished."""

    config: Any
    transport: Any
    loop: asyncio.AbstractEventLoop
    _next_look: asyncio.TimerHandle | None = None
    _signs = 0
    _taken = 0
    _taken_at = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._next_look = self.loop.call_later(_LOOK_EVERY_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self.unwatch()
        super().connection_lost(exc)  # type: ignore[misc]

    def unwatch(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _look(self) -> None:
        self._signs = self._signs + 1 if self._has_vanished() else 0
        if self._signs >= _LOOKS:
            self.transport.abort()
            return
        self._next_look = self.loop.call_later(_LOOK_EVERY_S, self._look)

    def _has_vanished(self) -> bool:
        sock = self.transport.get_extra_info("socket")
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        state, unacknowledged, silent_ms, taken = _INFO.unpack(info)
        if state in _HUNG_UP or (unacknowledged and silent_ms > SILENT_S * 1000):
            return True
        if taken != self._taken or not self.transport.get_write_buffer_size():
            self._taken, self._taken_at = taken, self.loop.time()
        return bool(self.loop.time() - self._taken_at > self.config.slow_s)
