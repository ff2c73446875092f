"""Whether something inside a sandbox answers: one short connection to a port, and perhaps one HTTP request."""

from __future__ import annotations

import asyncio

from atoll.errors import SandboxError, SandboxGoneError, SandboxNotFoundError
from atoll.guest.guest import Guest
from atoll.guest.port_streams import Ports, http_status

CHECK_S = 2.0
"""How long one check may take."""


async def asked(guest: Guest, port: int, path: str | None) -> int | None:
    """Connect to the port and return the status that an HTTP server answers with, or None if that is no HTTP. Without a
    path, return 200 once it is connected. This is never counted as a use of the sandbox."""
    async with await Ports(guest).connect(port=port) as stream:
        return 200 if path is None else await http_status(stream, port, path)


def refusal(answer: int | BaseException | None) -> str | None:
    """Return why this answer means that the sandbox is not ready, or None if it is. An empty text means that it is
    unknown. Raises what is no answer."""
    match answer:
        case None:
            return "the answer is not HTTP"
        case int():
            return None if 200 <= answer < 300 else f"it answered {answer}"
        case TimeoutError():  # also a SandboxTimeoutError
            return f"no answer within {CHECK_S:g} s"
        case SandboxNotFoundError():
            raise answer
        case OSError():
            return (answer.strerror or "no connection").lower()
        case SandboxGoneError():
            return ""  # it has just been paused, or has ended
        case SandboxError():
            return "the sandbox does not answer"
    raise answer


async def why_not_ready(guest: Guest, port: int, path: str | None) -> str | None:
    """Check once. Return None if the port answers as it should, otherwise why it does not."""
    try:
        async with asyncio.timeout(CHECK_S):
            return refusal(await asked(guest, port, path))
    except (TimeoutError, OSError) as error:
        return refusal(error)
