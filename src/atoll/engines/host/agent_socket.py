"""The unix socket between the host and an agent. The host creates it, the agent inherits it and accepts connections."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from atoll.engines.host.deadline import Deadline, readable

_BACKLOG = 128
_PAUSE_S = 0.01


def listen(path: Path) -> socket.socket:
    """Return a listening socket at a path that must be free. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


async def connect(path: Path, deadline: Deadline) -> socket.socket:
    """Return a connected, non-blocking socket. Raises OSError, including TimeoutError."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.setblocking(False)
        while not _try_connect(stream, path):
            # The agent's backlog is full, and the kernel does not report when there is room again.
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
    """Wait until an agent serves the socket. Returns False if the process (a pidfd) ended before. Raises
    TimeoutError."""
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
    """Close the sending side at once, to find out whether an agent accepts the connection.

    Connecting succeeds as soon as the socket listens, which says nothing about the agent. An agent that accepts sees
    the end of the stream and closes its side in order, while the kernel resets a connection that is never accepted.
    """
    stream.shutdown(socket.SHUT_WR)


def was_answered(stream: socket.socket) -> bool:
    """Return whether a readable stream was closed by an agent, and not reset by the kernel."""
    try:
        stream.recv(1)
    except (ConnectionResetError, BrokenPipeError):
        return False
    return True
