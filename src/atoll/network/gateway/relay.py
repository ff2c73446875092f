"""Copies bytes between two sockets, in both directions, until both sides have ended. After the first 512 KiB in one
direction, the kernel moves the rest through a pipe (`splice`), so that it is not copied to this process."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from atoll.network.gateway.bandwidth_share import BandwidthShare

_BUFFER = memoryview(bytearray(256 * 1024))
_FAST_AFTER = 512 * 1024
_PIPE_BYTES = 1 << 20
_ROUNDS = 4
_F_SETPIPE_SZ = 1031
_FLAGS = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK


class Pump:
    """One direction of a relay. It ends when the source ends, which is passed on to the target, or with an error. It
    then calls `ended`."""

    def __init__(
        self,
        source: socket.socket,
        target: socket.socket,
        share: BandwidthShare,
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._source, self._target, self._share, self._ended = source, target, share, ended
        self._resting: asyncio.TimerHandle | None = None
        self._total = 0
        self._rest = b""
        self._pipe: tuple[int, int] | None = None
        self._in_pipe = 0
        self._eof = self._over = False
        self._loop.add_reader(source.fileno(), self._readable)

    def stop(self, error: BaseException | None = None) -> None:
        """End the pump. May be repeated."""
        if self._over:
            return
        self._over = True
        if self._resting is not None:
            self._resting.cancel()
        self._loop.remove_reader(self._source.fileno())
        self._loop.remove_writer(self._target.fileno())
        if self._pipe is not None:
            os.close(self._pipe[0])
            os.close(self._pipe[1])
        self._ended(error)

    def _readable(self) -> None:
        try:
            for _ in range(_ROUNDS):
                if not self._share.is_open():
                    self._rest_for(self._share.pause_s())
                    break
                if not (self._take_fast() if self._pipe is not None else self._take()):
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.stop(error)

    def _rest_for(self, seconds: float) -> None:
        if seconds > 0:
            self._loop.remove_reader(self._source.fileno())
            self._resting = self._loop.call_later(seconds, self._rested)

    def _rested(self) -> None:
        self._resting = None
        self._loop.add_reader(self._source.fileno(), self._readable)

    def _take(self) -> bool:
        """Copy one piece. Return whether to go on at once."""
        got = self._source.recv_into(_BUFFER)
        if not got:
            return self._end()
        self._total += got
        self._share.count(got)
        try:
            sent = self._target.send(_BUFFER[:got])
        except (BlockingIOError, InterruptedError):
            sent = 0
        if sent < got:
            self._rest = bytes(_BUFFER[sent:got])
            self._wait()
            return False
        if self._total > _FAST_AFTER:
            self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            with suppress(OSError):  # the size may exceed the user's limit; a smaller pipe works too
                fcntl.fcntl(self._pipe[1], _F_SETPIPE_SZ, _PIPE_BYTES)
        return True

    def _take_fast(self) -> bool:
        assert self._pipe is not None
        got = os.splice(self._source.fileno(), self._pipe[1], _PIPE_BYTES, flags=_FLAGS)
        if not got:
            return self._end()
        self._in_pipe += got
        self._share.count(got)
        return self._give_fast()

    def _give_fast(self) -> bool:
        assert self._pipe is not None
        try:
            while self._in_pipe:
                self._in_pipe -= os.splice(self._pipe[0], self._target.fileno(), self._in_pipe, flags=_FLAGS)
        except (BlockingIOError, InterruptedError):
            self._wait()
            return False
        return True

    def _end(self) -> bool:
        self._eof = True
        with suppress(OSError):
            self._target.shutdown(socket.SHUT_WR)
        self.stop()
        return False

    def _wait(self) -> None:
        self._loop.remove_reader(self._source.fileno())
        self._loop.add_writer(self._target.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            if self._rest:
                self._rest = self._rest[self._target.send(self._rest) :]
                if self._rest:
                    return
            self._loop.remove_writer(self._target.fileno())
            if self._in_pipe and not self._give_fast():
                return
            self._loop.add_reader(self._source.fileno(), self._readable)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.stop(error)


async def relay(one: socket.socket, other: socket.socket, share: BandwidthShare) -> None:
    """Relay in both directions until both have ended or one fails."""
    done = asyncio.get_running_loop().create_future()
    left = 2

    def ended(error: BaseException | None) -> None:
        nonlocal left
        left -= 1
        if (left == 0 or error is not None) and not done.done():
            done.set_result(error)

    pumps = (Pump(one, other, share, ended), Pump(other, one, share, ended))
    try:
        await done
    finally:
        for pump in pumps:
            pump.stop()


def settle(future: asyncio.Future[BaseException | None], error: BaseException | None = None) -> None:
    if not future.done():
        future.set_result(error)


def reset(connection: socket.socket) -> None:
    """Close a connection with a TCP reset, so that the other side sees an error instead of an end."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
