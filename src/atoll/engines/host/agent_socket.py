"""The unix socket between us and an agent. We make it listen, the agent inherits it and accepts, we connect."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from atoll.waiting import Deadline, readable

_BACKLOG = 128
_PAUSE_S = 0.01


def listen(path: Path) -> socket.socket:
    """A listening socket at a path that must be free. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


async def connect(path: Path, deadline: Deadline) -> socket.socket:
    """A connected, non-blocking socket. Raises OSError, TimeoutError among them."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.setblocking(False)
        while not _try_connect(stream, path):
            # The agent is behind with accepting. The kernel tells nobody when there is room again.
            if not deadline.left():
                raise TimeoutError("the agent accepts no connection")
            await asyncio.sleep(_PAUSE_S)
    except BaseException:
        stream.close()
        raise
    return stream


def _try_connect(stream: socket.socket, path: Path) -> bool:
    try:
        stream.connect(str(path))
    except BlockingIOError:
        return False
    return True


async def knock(path: Path, process: int, deadline: Deadline) -> bool:
    """Wait until an agent serves the socket. False: the process (a pidfd) ended before. Raises TimeoutError."""
    try:
        with await connect(path, deadline) as stream:
            hang_up(stream)
            ready = await readable({stream.fileno(), process}, deadline)
            if not ready:
                raise TimeoutError
            return stream.fileno() in ready and was_answered(stream)
    except (ConnectionResetError, ConnectionRefusedError, BrokenPipeError):
        return False


def hang_up(stream: socket.socket) -> None:
    """Connecting succeeds as soon as the socket listens, which says nothing about the agent. So we hang up at once: an
    agent that accepts sees the end and closes its side in order, while the kernel resets a connection that nobody will
    ever accept."""
    stream.shutdown(socket.SHUT_WR)


def was_answered(stream: socket.socket) -> bool:
    """Of a stream that can be read: whether it was an agent who closed it, and not the kernel."""
    try:
        stream.recv(1)
    except (ConnectionResetError, BrokenPipeError):
        return False
    return True
