"""Exposed ports of sandboxes: how they are stored, which variables they set, and their URLs.

They are stored as labels of the sandbox, so that they exist from its first moment, survive a restart of the server and
are copied when the sandbox is forked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, urlsplit

from atoll.manager import LimitReachedError, Record
from atoll.service.models.exposed_port import ExposedPort, ExposedUrl, HealthCheck

PORT_LABEL = "exposed_port."
MAX_PORTS = 64
VSCODE = "VSCODE"
"""The name of a port whose URL contains a token and the folder to open, as VS Code's own server requires."""
_PUBLIC = "/public"
_RESERVED = frozenset(
    ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "PWD", "IFS", "ENV", "BASH_ENV", "PYTHONUNBUFFERED")
)
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_PLACEHOLDERS = frozenset(("public_url", "sandbox_id", "port", "name"))


def merged(*groups: Iterable[ExposedPort]) -> list[ExposedPort]:
    """Merge groups of ports. A port replaces one of the same name in an earlier group. Raises ValueError if one group
    contains a name twice, or if there are too many ports."""
    found: dict[str, ExposedPort] = {}
    for group in groups:
        ports = list(group)
        named = {port.name: port for port in ports}
        if len(named) < len(ports):
            raise ValueError("the names of exposed ports must differ")
        found |= named
    if len(found) > MAX_PORTS:
        raise ValueError(f"a sandbox has at most {MAX_PORTS} exposed ports")
    return list(found.values())


def port_of(check: HealthCheck, ports: Iterable[ExposedPort]) -> int:
    """Return the number of the port to check. Raises ValueError if no port has that name."""
    if isinstance(check.port, int):
        return check.port
    named = {port.name: port.port for port in ports}
    if check.port not in named:
        raise ValueError(f"the health check names the port {check.port!r}, which is not one of the exposed ports")
    return named[check.port]


def labels_of(ports: Iterable[ExposedPort]) -> dict[str, str]:
    return {f"{PORT_LABEL}{port.name}": f"{port.port}{_PUBLIC if port.public else ''}" for port in ports}


def ports_of(labels: Mapping[str, str]) -> list[ExposedPort]:
    return [
        ExposedPort.model_construct(
            name=label.removeprefix(PORT_LABEL), port=int(value.removesuffix(_PUBLIC)), public=value.endswith(_PUBLIC)
        )
        for label, value in labels.items()
        if label.startswith(PORT_LABEL)
    ]


def numbers_of(labels: Mapping[str, str]) -> list[int]:
    return [port.port for port in ports_of(labels)]


def variables_of(ports: Iterable[ExposedPort], taken: Iterable[str] = ()) -> dict[str, str]:
    """Return `NAME=PORT` for each port, except for variables that are taken or that the system needs."""
    refused = _RESERVED | set(taken)
    named = ((port.name.replace("-", "_"), str(port.port)) for port in ports)
    return {name: port for name, port in named if name not in refused}


def with_port(labels: Mapping[str, str], port: ExposedPort) -> dict[str, str]:
    """Return the labels with this port added. Raises LimitReachedError if there are too many ports."""
    changed = {**labels, **labels_of([port])}
    if len(ports_of(changed)) > MAX_PORTS:
        raise LimitReachedError(f"a sandbox has at most {MAX_PORTS} exposed ports", hint="Remove one of them.")
    return changed


def without_port(labels: Mapping[str, str], port: int) -> dict[str, str]:
    """Return the labels without any name of this port."""
    names = {f"{PORT_LABEL}{each.name}" for each in ports_of(labels) if each.port == port}
    return {label: value for label, value in labels.items() if label not in names}


def check_pattern(pattern: str) -> str:
    """Validate and return a URL pattern. Raises ValueError, for example if the pattern cannot tell two ports apart."""
    found = set(_PLACEHOLDER.findall(pattern))
    if found - _PLACEHOLDERS:
        raise ValueError(f"unknown placeholder {{{sorted(found - _PLACEHOLDERS)[0]}}}")
    if "sandbox_id" not in found or not found & {"port", "name"}:
        raise ValueError("the pattern must contain {sandbox_id}, and {port} or {name}")
    if not pattern.startswith(("http://", "https://", "{public_url}")):
        raise ValueError("the pattern must begin with http://, https:// or {public_url}")
    return pattern


class PortUrls:
    """Builds the URLs of exposed ports."""

    def __init__(self, public_url: str, domain: str, pattern: str | None = None) -> None:
        self.public_url = public_url.rstrip("/")
        self._hosts = _ports_hosts(self.public_url, domain)
        self._pattern = pattern

    def of(self, record: Record, token: str | None = None) -> list[ExposedUrl]:
        return [self._url(record, port, token) for port in ports_of(record.labels)]

    def by_path(self, sandbox_id: str, port: int) -> str:
        return f"{self.public_url}/api/v1/sandboxes/{sandbox_id}/ports/{port}/"

    def by_host(self, sandbox_id: str, port: int) -> str | None:
        return f"{self._hosts[0]}{port}-{sandbox_id}.{self._hosts[1]}/" if self._hosts else None

    def _url(self, record: Record, port: ExposedPort, token: str | None) -> ExposedUrl:
        query = ""
        if port.name == VSCODE:
            folder = f"folder={quote(record.spec.directory)}"
            query = f"?tkn={token}&{folder}" if token else f"?{folder}"
        host = self.by_host(record.id, port.port)
        return ExposedUrl(
            name=port.name,
            url=self._first(record.id, port) + query,
            port=port.port,
            host_url=host + query if host else None,
            public=port.public,
        )

    def _first(self, sandbox_id: str, port: ExposedPort) -> str:
        if self._pattern is None:
            return self.by_path(sandbox_id, port.port)
        values = {"public_url": self.public_url, "sandbox_id": sandbox_id, "port": str(port.port), "name": port.name}
        url = _PLACEHOLDER.sub(lambda match: values[match[1]], self._pattern)
        return url if url.endswith("/") else f"{url}/"


def _ports_hosts(public_url: str, domain: str) -> tuple[str, str] | None:
    """Return the parts before and after `PORT-ID.` in the URLs of exposed ports, or None if there are no such URLs.

    Every name below `localhost` is the client's own machine, so such URLs lead here only if the server is on that
    machine.
    """
    try:
        found = urlsplit(public_url)
        host, port = found.hostname or "", found.port
    except ValueError:
        return None
    local = host in ("localhost", "::1") or host.startswith("127.")
    if not host or (domain == "localhost" and not local):
        return None
    return f"{found.scheme}://", f"{domain}:{port}" if port else domain
