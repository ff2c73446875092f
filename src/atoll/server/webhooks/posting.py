"""A request to an address that a user named, which must not become one to the server's own network.

The name is resolved once, every address that it has is checked, and the connection goes to one of these addresses:
there is no second name lookup, no proxy and no redirect. The size of the answer is bounded.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

import h11

from atoll.model.addresses import is_public

_POST_S = 10.0
_MAX_ANSWER_BYTES = 64 << 10
_PIECE = 16 << 10


class NotPostedError(Exception):
    """The request did not arrive, or was not accepted. The message is for the server's administrators."""


def parse(url: str) -> SplitResult:
    """Return the parts of a URL. Raises ValueError for a URL that no request can be sent to."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None or parts.fragment:
        raise ValueError("invalid URL: write https://HOST/PATH, without a user or a fragment")
    if not url.isascii() or any(letter <= " " for letter in url):
        raise ValueError("invalid URL: it may contain only ASCII characters and no spaces")
    _ = parts.port  # raises ValueError for one that is out of range
    return parts


async def post(url: str, headers: dict[str, str], body: bytes, *, hosts: Collection[str] = ()) -> tuple[int, bytes]:
    """Send a request and return the status and the answer. Only public addresses are reached, except for hosts that the
    server's settings name. Raises NotPostedError."""
    parts = parse(url)
    assert parts.hostname is not None
    try:
        async with asyncio.timeout(_POST_S):
            address = await _resolve(parts.hostname, parts.port or _port(parts), parts.hostname in hosts)
            return await _exchange(parts, address, headers, body)
    except TimeoutError as error:
        raise NotPostedError("the request timed out") from error
    except (OSError, ssl.SSLError, h11.ProtocolError) as error:
        raise NotPostedError(str(error) or type(error).__name__) from error


async def _resolve(host: str, port: int, is_named: bool) -> tuple[str, int]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(place[4][0]).partition("%")[0]) for place in found]
    if not is_named:
        for address in addresses:
            if not is_public(address):
                raise NotPostedError(f"{host} is {address}, which is not public")
    if not addresses:
        raise NotPostedError(f"{host} has no address")
    return str(addresses[0]), port


async def _exchange(
    parts: SplitResult, address: tuple[str, int], headers: dict[str, str], body: bytes
) -> tuple[int, bytes]:
    context = _tls() if parts.scheme == "https" else None
    name = parts.hostname if context is not None else None
    reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=name)
    try:
        http = h11.Connection(h11.CLIENT)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        fields = {"Host": parts.netloc, **headers, "Content-Length": str(len(body)), "Connection": "close"}
        request = h11.Request(method="POST", target=target, headers=list(fields.items()))
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(http.send(event) or b"")
        await writer.drain()
        return await _answer(http, reader)
    finally:
        writer.transport.abort()


async def _answer(http: h11.Connection, reader: asyncio.StreamReader) -> tuple[int, bytes]:
    status, answer = 0, b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(_PIECE))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            answer += event.data
            if len(answer) > _MAX_ANSWER_BYTES:
                raise NotPostedError("the answer is too long")
        elif isinstance(event, h11.EndOfMessage):
            return status, answer
        elif isinstance(event, h11.ConnectionClosed):
            raise NotPostedError("there was no answer")


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the TLS settings. Reading all certificates takes long enough to hold up the event loop."""
    return ssl.create_default_context()


def _port(parts: SplitResult) -> int:
    return 443 if parts.scheme == "https" else 80
