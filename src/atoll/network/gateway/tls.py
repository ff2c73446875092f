"""Terminates TLS on one connection. The decrypted bytes are read and written through a plain socket pair, so that code
for plain connections can be used."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress

_PIECE = 64 * 1024
_HANDSHAKE_S = 10.0


class TlsEnd:
    def __init__(self, raw: socket.socket, context: ssl.SSLContext, name: str, *, server: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._raw = raw
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server, server_hostname=None if server else name
        )
        self._turn = asyncio.Lock()
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self.plain, self._inner = socket.socketpair()
        self.plain.setblocking(False)
        self._inner.setblocking(False)

    async def open(self, start: bytes = b"") -> None:
        """Do the TLS handshake. `start` is the part of it that has been read already. Raises ConnectionError if it
        fails."""
        self._incoming.write(start)
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await self._shake_hands()
        except ssl.SSLError as error:
            with suppress(OSError):
                await self._flush()  # the alert
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            raise ConnectionError(reason.lower().replace("_", " ")) from error
        self._tasks = (
            asyncio.create_task(self._inwards(), name="tls inwards"),
            asyncio.create_task(self._outwards(), name="tls outwards"),
        )

    async def close(self) -> None:
        """Close the connection at once. Bytes that have not been passed on are lost. May be repeated."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.plain.close()
        self._inner.close()

    async def drain(self) -> None:
        """Wait until everything that was written to the plain socket has been sent. Shut the plain socket down for
        writing first."""
        if self._tasks:
            await asyncio.wait(self._tasks[1:])

    async def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                data = await self._loop.sock_recv(self._raw, _PIECE)
                if not data:
                    raise ConnectionError("it ended in the middle of a handshake") from None
                self._incoming.write(data)
                continue
            await self._flush()
            return

    async def _inwards(self) -> None:
        try:
            while True:
                try:
                    data = self._tls.read(_PIECE)
                except ssl.SSLWantReadError:
                    await self._flush()
                    more = await self._loop.sock_recv(self._raw, _PIECE)
                    if not more:
                        break  # an end without a TLS close is accepted, because HTTP itself shows what is missing
                    self._incoming.write(more)
                    continue
                if not data:
                    break
                await self._loop.sock_sendall(self._inner, data)
        except (OSError, ValueError):
            pass
        with suppress(OSError):
            self._inner.shutdown(socket.SHUT_WR)

    async def _outwards(self) -> None:
        with suppress(OSError, ValueError):
            while data := await self._loop.sock_recv(self._inner, _PIECE):
                self._tls.write(data)
                await self._flush()
            with suppress(ssl.SSLError):
                self._tls.unwrap()  # send the TLS close, and do not wait for an answer
            await self._flush()
            self._raw.shutdown(socket.SHUT_WR)

    async def _flush(self) -> None:
        async with self._turn:
            data = self._outgoing.read()
            if data:
                await self._loop.sock_sendall(self._raw, data)
