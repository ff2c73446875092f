"""A request to an exposed port: how it came, and what of it and of its answer is passed on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from atoll.server.middleware.auth import SESSION_HEADER, services_of

COOKIE = "atoll_port"
"""Stands for a link, on the host of its port alone. Never goes inside, and nothing inside can set it."""

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
    """One request to an exposed port: where it leads, and how it came."""

    sandbox_id: str
    port: int
    target: bytes
    """What to ask for inside: path and query as they were sent."""
    host: str | None = None
    """The host it was asked for by, if that is the port's own; None: by path."""
    keeps_authorization: bool = False
    """The header is meant for what listens inside: it is no credential of ours."""
    until: float | None = None
    """When the right to it ends."""
    scheme: str = "http"
    session_key: str = ""
    """The key that what listens inside knows its callers by. It is not one of ours."""
    for_anyone: bool = False
    """It is public, so that whoever listens inside may say whose pages can read its answers."""

    def inwards(self, headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
        """The headers of a request as they go inside. By path the browser sends what it has for the API as well."""
        found: RawHeaders = [(b"host", (self.host or f"localhost:{self.port}").encode("latin-1"))]
        for name, value in headers:
            lower = name.decode("latin-1").lower()
            if lower in _NOT_IN or lower.startswith(("x-forwarded-", "sec-websocket-")):
                continue
            if lower == _SESSION and (self.session_key or value.strip().lower().startswith(_OURS)):
                continue  # any other is meant for what listens inside
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
        """The headers of an answer as they are shown to a browser."""
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
    """Return the request with the sandbox's own key in place of a valid session key of ours, which stays outside.

    OpenHands's agent server knows its callers by the key in its environment, sent as a header or, by browsers that open
    a WebSocket, in the query.
    """
    callbacks = services_of(connection).sandboxes.callbacks
    sent = connection.headers.get(SESSION_HEADER)
    key = await callbacks.key_inside(wanted.sandbox_id, sent) if sent else None
    found = _IN_QUERY.search(wanted.target)
    in_query = await callbacks.key_inside(wanted.sandbox_id, found[0].decode()) if found else None
    target = _IN_QUERY.sub(in_query.encode(), wanted.target, count=1) if in_query else wanted.target
    return dataclasses.replace(wanted, target=target, session_key=key or "") if key or in_query else wanted


def cookies(header: str) -> list[str]:
    """The values of our own cookie: there can be several, of which a page may have made all but one."""
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return [value for name, _, value in pairs if name == COOKIE]


def _without_ours(value: bytes) -> bytes:
    parts = [part.strip() for part in value.split(b";")]
    return b"; ".join(part for part in parts if part and part.partition(b"=")[0].strip() != COOKIE.encode())


def _of_this_host(value: bytes) -> bytes:
    """A cookie that is good for this host and no other; empty if it would be ours."""
    first, *attributes = value.split(b";")
    if first.partition(b"=")[0].strip() == COOKIE.encode():
        return b""
    kept = [each for each in attributes if each.partition(b"=")[0].strip().lower() != b"domain"]
    return b";".join((first, *kept))
