"""A request to an exposed port: how it arrived, and which parts of it and of its answer are passed on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from atoll.server.middleware.auth import SESSION_HEADER, services_of

COOKIE = "atoll_port"
"""The cookie that stands for a link, on the host of its port alone. It never goes inside, and nothing inside can set
it."""

_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_NOT_IN = _HOP | {"host", "content-length", "expect", "forwarded"}
_SESSION, _OURS = "x-session-api-key", b"atolls_"
_CREDENTIALS = frozenset(("authorization", "cookie"))
_NOT_OUT = _HOP | {"strict-transport-security", "clear-site-data", "alt-svc"}
_NOT_OUT_BY_PATH = frozenset(
    (
        "set-cookie",
        "content-security-policy",
        "service-worker-allowed",
        "access-control-allow-origin",
        "access-control-allow-credentials",
    )
)
_SHARING = frozenset(("access-control-allow-origin", "access-control-allow-credentials"))
_NO_ORIGIN = "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads"
_IN_QUERY = re.compile(rb"(?<=[?&]session_api_key=)[A-Za-z0-9_.-]{1,512}(?=&|$)")

RawHeaders = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class PortRequest:
    """One request to an exposed port: where it leads, and how it arrived."""

    sandbox_id: str
    port: int
    target: bytes
    """The path and query to request inside, as they were sent."""
    host: str | None = None
    """The host name in the request if it is the port's own, or None if the port was requested by path."""
    keeps_authorization: bool = False
    """Whether the Authorization header is meant for the program inside, and is no credential of this server."""
    until: float | None = None
    """When the right to the port ends."""
    scheme: str = "http"
    session_key: str = ""
    """The key by which the program inside recognizes its callers. It is not a key of this server."""
    for_anyone: bool = False
    """Whether the port is public, so that the program inside may say which origins can read its answers."""

    def inwards(self, headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
        """Return the headers of a request as they go inside. If the port was requested by path, credentials are left
        out, because the browser sends those that it has for the API."""
        found: RawHeaders = [(b"host", (self.host or f"localhost:{self.port}").encode("latin-1"))]
        for name, value in headers:
            lower = name.decode("latin-1").lower()
            if lower in _NOT_IN or lower.startswith(("x-forwarded-", "sec-websocket-")):
                continue
            if lower == _SESSION and (self.session_key or value.strip().lower().startswith(_OURS)):
                continue  # any other is meant for the program inside
            if lower in _CREDENTIALS:
                if self.host is None or (lower == "authorization" and not self.keeps_authorization):
                    continue
                value = _without_ours(value) if lower == "cookie" else value
                if not value:
                    continue
            found.append((name, value))
        if self.session_key:
            found.append((b"x-session-api-key", self.session_key.encode("latin-1")))
        if self.host is not None:
            found += [
                (b"x-forwarded-host", self.host.encode("latin-1")),
                (b"x-forwarded-proto", self.scheme.encode()),
            ]
        return found

    def outwards(self, headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
        """Return the headers of an answer as the browser gets them."""
        found: RawHeaders = []
        for name, value in headers:
            lower = name.decode("latin-1").lower()
            if lower in _NOT_OUT or lower.startswith("x-accel-"):
                continue
            if self.host is None and lower in _NOT_OUT_BY_PATH and not (self.for_anyone and lower in _SHARING):
                continue
            if lower == "set-cookie":
                value = _of_this_host(value)
                if not value:
                    continue
            found.append((lower.encode("latin-1"), value))
        if self.host is None:
            found += [
                (b"content-security-policy", _NO_ORIGIN.encode()),
                (b"x-content-type-options", b"nosniff"),
                (b"referrer-policy", b"no-referrer"),
            ]
        return found


async def with_inside_key(connection: HTTPConnection, wanted: PortRequest) -> PortRequest:
    """Return the request with the sandbox's own key in place of a valid session key, which stays outside.

    OpenHands's agent server recognizes its callers by the key in its environment, sent as a header or, by browsers that
    open a WebSocket, in the query.
    """
    callbacks = services_of(connection).sandboxes.callbacks
    sent = connection.headers.get(SESSION_HEADER)
    key = await callbacks.key_inside(wanted.sandbox_id, sent) if sent else None
    found = _IN_QUERY.search(wanted.target)
    in_query = await callbacks.key_inside(wanted.sandbox_id, found[0].decode()) if found else None
    target = _IN_QUERY.sub(in_query.encode(), wanted.target, count=1) if in_query else wanted.target
    return dataclasses.replace(wanted, target=target, session_key=key or "") if key or in_query else wanted


def cookies(header: str) -> list[str]:
    """Return the values of this server's cookie. There can be several, of which a page may have made all but one."""
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return [value for name, _, value in pairs if name == COOKIE]


def _without_ours(value: bytes) -> bytes:
    parts = [part.strip() for part in value.split(b";")]
    return b"; ".join(part for part in parts if part and part.partition(b"=")[0].strip() != COOKIE.encode())


def _of_this_host(value: bytes) -> bytes:
    """Return a cookie that is valid for this host only, or nothing if it would replace this server's own cookie."""
    first, *attributes = value.split(b";")
    if first.partition(b"=")[0].strip() == COOKIE.encode():
        return b""
    kept = [each for each in attributes if each.partition(b"=")[0].strip().lower() != b"domain"]
    return b";".join((first, *kept))
