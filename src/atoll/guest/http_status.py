"""Whether what listens inside answers HTTP: one request, of whose answer only the status line is read."""

from __future__ import annotations

import re
from typing import Protocol

_MAX_LINE = 4096
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: |\r|\n)")


class PortConnection(Protocol):
    """A connection to a port of a sandbox."""

    async def read(self, size: int, /) -> bytes: ...

    async def write(self, data: bytes, /) -> None: ...


async def http_status(connection: PortConnection, port: int, path: str) -> int | None:
    """The status of the answer; None if it is none. The caller bounds the time."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    await connection.write(request.encode())
    line = b""
    while len(line) < _MAX_LINE and b"\n" not in line:
        data = await connection.read(_MAX_LINE)
        if not data:
            break
        line += data
    match = _STATUS_LINE.match(line)
    return int(match[1]) if match is not None else None
