"""Getting a socket to the agent from whoever knows how."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from atoll.errors import AgentUnreachableError

Connect = Callable[[], Awaitable[socket.socket]]
"""Gives a new connected stream socket to the agent each time it is called."""


async def dial(connect: Connect, timeout_s: float) -> socket.socket:
    """Raises AgentUnreachableError, or what the engine says in terms of `atoll.errors`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await connect()
    except OSError as error:
        # Also a TimeoutError: that is an OSError.
        reason = error.strerror or str(error) or f"no connection within {timeout_s:g} s"
        raise AgentUnreachableError(f"cannot reach the agent: {reason}") from error
