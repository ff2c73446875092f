"""HTTP for registries: authentication, redirects and proxies, with waits that can be cancelled."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import re
import socket
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from atoll.archive.work import Work
from atoll.errors import ImageError, ImageUnreachableError
from atoll.images.access import Access
from atoll.images.reference import is_loopback
from atoll.images.registry_login import Credentials

HTTP_ERRORS = (OSError, http.client.HTTPException)
"""Network errors. All of them may be temporary."""

_BLOCK = 256 << 10
_MAX_REDIRECTS = 5
_MAX_TOKEN = 1 << 20
_PARAMETER = re.compile(r'([a-zA-Z]+)="([^"]*)"')
_TOKEN = re.compile(r"^[\x21-\x7e]+\Z")


@dataclass(frozen=True, slots=True)
class Body:
    """What a request sends. It is opened again for each attempt."""

    open: Callable[[], BinaryIO]
    size: int

    @classmethod
    def of(cls, data: bytes) -> Body:
        return cls(lambda: io.BytesIO(data), len(data))


@dataclass(frozen=True, slots=True)
class Authority:
    """The registry, the scope of the token to request from it, and whether plain HTTP is allowed."""

    registry: str
    scope: str
    plain_http: bool
    base: str
    """The URL that all of its own URLs begin with. Credentials are sent nowhere else."""

    @property
    def origin(self) -> tuple[str, str | None, int | None]:
        return _origin(self.base)


class Transport:
    """It may be used by several threads at once."""

    def __init__(
        self, authority: Authority, work: Work, access: Access | None = None, *, timeout_s: float = 30.0
    ) -> None:
        self._authority, self._work, self._timeout_s = authority, work, timeout_s
        self._access = access or Access()
        self._authorization = ""
        self._authorizing = threading.Lock()
        self.used_login = False
        """Whether a login was used, so that the responses may not be meant for everybody."""

    @contextlib.contextmanager
    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Body | None = None,
        work: Work | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Provide the response to a request, whatever its status. `work` is what may cancel it, if it is only a part.

        Redirects are followed, and a response of 401 is answered by a second attempt with authentication.
        """
        self._allow(url)
        for attempt in range(2):
            used = self._authorization
            with self._follow(method, url, headers, body, work or self._work) as response:
                if response.status != 401 or attempt or not self._renew(used, response):
                    yield response
                    return

    def _renew(self, used: str, response: http.client.HTTPResponse) -> bool:
        """Respond to a challenge, unless another thread has done so since. Returns False if there is nothing to try."""
        with self._authorizing:
            if used != self._authorization:
                return True
            return self._authorize(response.headers.get_all("WWW-Authenticate") or [])

    @contextlib.contextmanager
    def _follow(
        self, method: str, url: str, given: Mapping[str, str], body: Body | None, work: Work
    ) -> Iterator[http.client.HTTPResponse]:
        headers = dict(given)
        if self._authorization and _origin(url) == self._authority.origin:
            headers["Authorization"] = self._authorization
        for _ in range(_MAX_REDIRECTS):
            with self._exchange(method, url, headers, body, work) as response:
                followed = (301, 302, 303, 307, 308) if method in ("GET", "HEAD") else (307, 308)
                if response.status not in followed:
                    yield response
                    return
                target = urllib.parse.urljoin(url, response.headers.get("Location", ""))
            self._allow(target)
            if _origin(target) != _origin(url):
                headers.pop("Authorization", None)
            url = target
        raise ImageError(f"the registry {self._authority.registry} redirects too often")

    def _allow(self, url: str) -> None:
        """Check a URL that a registry refers to. It must not lead from TLS to plain HTTP, or to this host."""
        try:
            parts = urllib.parse.urlsplit(url)
            allowed = bool(parts.hostname) and (
                parts.scheme == "https" or (parts.scheme == "http" and self._authority.plain_http)
            )
            inside = is_loopback(parts.hostname or "") and not is_loopback(self._authority.registry)
        except ValueError:
            allowed, inside = False, False
        if not allowed or inside:
            where = "" if self._access.guarded else f": {url[:120]!r}"
            raise ImageError(f"the registry {self._authority.registry} refers to an unsafe address{where}")

    def _authorize(self, challenges: list[str]) -> bool:
        """Set the Authorization header in response to a challenge. Returns False if there is nothing new to try."""
        for challenge in challenges:
            scheme, _, rest = challenge.strip().partition(" ")
            credentials = self._access.credentials(self._authority.registry)
            self.used_login = self.used_login or credentials is not None
            if scheme.lower() == "bearer":
                self._authorization = f"Bearer {self._token(dict(_PARAMETER.findall(rest)), credentials)}"
                return True
            if scheme.lower() == "basic" and credentials is not None and credentials.username:
                self._authorization = credentials.basic
                return True
        return False

    def _token(self, challenge: dict[str, str], credentials: Credentials | None) -> str:
        realm = challenge.get("realm", "")
        self._allow(realm)
        query = {"service": challenge.get("service", ""), "scope": challenge.get("scope") or self._authority.scope}
        headers = {"Accept": "application/json"}
        body = None
        if credentials is not None and credentials.identity_token:
            form = query | {
                "grant_type": "refresh_token",
                "refresh_token": credentials.identity_token,
                "client_id": "atoll",
            }
            body, url = urllib.parse.urlencode(form).encode(), realm
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        else:
            url = f"{realm}{'&' if '?' in realm else '?'}{urllib.parse.urlencode(query)}"
            if credentials is not None:
                headers["Authorization"] = credentials.basic
        sent = Body.of(body) if body else None
        with self._exchange("POST" if body else "GET", url, headers, sent, self._work) as response:
            data = response.read(_MAX_TOKEN)
            if response.status != 200:
                raise ImageError(
                    f"the registry {self._authority.registry} issued no token: it answered {response.status}",
                    hint=f"Check the name, or log in: docker login {self._authority.registry}",
                )
        try:
            value = json.loads(data)
            token = value.get("token") or value.get("access_token")
            if not _TOKEN.match(token):
                raise ValueError("no token")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ImageError(f"the registry {self._authority.registry} issued an invalid token") from error
        return str(token)

    @contextlib.contextmanager
    def _exchange(
        self, method: str, url: str, headers: dict[str, str], body: Body | None, work: Work
    ) -> Iterator[http.client.HTTPResponse]:
        """Send one request and provide the response. Cancelling the work shuts down the socket, which ends any wait."""
        connection, target, extra = _connection(url, self._access, self._timeout_s)
        work.detached(connection.connect, lambda _: connection.close())
        sock = connection.sock

        def interrupt() -> None:
            # Shut down the descriptor below TLS, because the TLS state belongs to the reading thread.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

        headers = {"User-Agent": "atoll", "Accept-Encoding": "identity"} | headers | extra
        if body is not None:
            headers["Content-Length"] = str(body.size)
        elif method not in ("GET", "HEAD"):
            headers["Content-Length"] = "0"
        try:
            with work.on_cancel(interrupt), body.open() if body is not None else contextlib.nullcontext() as file:
                connection.request(method, target, file, headers)
                # A response that is not read to its end keeps the socket open even if the connection is closed.
                with connection.getresponse() as response:
                    yield response
        except HTTP_ERRORS:
            work.check()
            raise
        finally:
            connection.close()


def _connection(url: str, access: Access, timeout_s: float) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    """Return an unconnected connection, the request target, and headers for a proxy."""
    connection, target, extra = _route(url, timeout_s)
    # http.client has no public way to choose the address to connect to.
    if access.guarded and connection.host == (urllib.parse.urlsplit(url).hostname or ""):
        connection._create_connection = access.connect  # type: ignore[attr-defined]  # noqa: SLF001
    elif access.guarded:
        _check_proxied(url, access)
    return connection, target, extra


def _check_proxied(url: str, access: Access) -> None:
    """Check the addresses of a host that is reached through a proxy.

    The proxy makes the connection and looks the name up itself. A name that cannot be resolved here is left to the
    proxy, which may know it.
    """
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        addresses = access.resolve(host, port)
    except ImageUnreachableError:
        return
    access.check(host, port, addresses)


def _route(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    address = urllib.request.getproxies_environment().get(parts.scheme, "")
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        address = ""
    proxy = urllib.parse.urlsplit(address if "//" in address else f"//{address}")
    extra: dict[str, str] = {}
    if proxy.username:
        secret = f"{urllib.parse.unquote(proxy.username)}:{urllib.parse.unquote(proxy.password or '')}"
        extra["Proxy-Authorization"] = "Basic " + base64.b64encode(secret.encode()).decode()
    if parts.scheme == "https":
        context = ssl.create_default_context()
        if not proxy.hostname:
            return (
                http.client.HTTPSConnection(host, port, timeout=timeout_s, blocksize=_BLOCK, context=context),
                target,
                {},
            )
        tunnel = http.client.HTTPSConnection(
            proxy.hostname, proxy.port or 80, timeout=timeout_s, blocksize=_BLOCK, context=context
        )
        tunnel.set_tunnel(host, port, extra)
        return tunnel, target, {}
    if not proxy.hostname:
        return http.client.HTTPConnection(host, port, timeout=timeout_s, blocksize=_BLOCK), target, {}
    return http.client.HTTPConnection(proxy.hostname, proxy.port or 80, timeout=timeout_s, blocksize=_BLOCK), url, extra


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
