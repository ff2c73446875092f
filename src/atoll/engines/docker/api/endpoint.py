"""The address of the Docker engine, found as the `docker` program finds it.

The order is: `DOCKER_HOST`, the context that `DOCKER_CONTEXT` or `docker context use` chose, the usual sockets.
"""

from __future__ import annotations

import hashlib
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atoll.errors import EngineUnavailableError

DEFAULT_SOCKET = "/var/run/docker.sock"
_HINT = "DOCKER_HOST is written unix:///PATH or tcp://HOST:PORT; with DOCKER_TLS_VERIFY=1 the latter is encrypted."
_PLAIN_PORT, _TLS_PORT = 2375, 2376


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a Docker engine. Either `path` (a unix socket) or `host` is set."""

    path: str = ""
    host: str = ""
    port: int = 0
    certificates: Path | None = None
    """The directory with ca.pem, cert.pem and key.pem; None if the connection is not encrypted."""

    def __str__(self) -> str:
        return f"unix://{self.path}" if self.path else f"tcp://{self.host}:{self.port}"

    @property
    def may_be_local(self) -> bool:
        """Whether the containers may be processes of this machine. This is not certain: a socket can be forwarded."""
        return bool(self.path)

    def tls(self) -> ssl.SSLContext | None:
        if self.certificates is None:
            return None
        try:
            context = ssl.create_default_context(cafile=str(self.certificates / "ca.pem"))
            context.load_cert_chain(self.certificates / "cert.pem", self.certificates / "key.pem")
        except (OSError, ssl.SSLError) as error:
            raise EngineUnavailableError(
                f"the certificates for the Docker engine in '{self.certificates}' cannot be used: {error}",
                hint="ca.pem, cert.pem and key.pem must be in the directory that DOCKER_CERT_PATH names.",
            ) from error
        return context


def find(environ: Mapping[str, str] | None = None) -> Endpoint:
    """Find the address of the Docker engine. Does not check that it answers. Raises EngineUnavailableError if the
    address is invalid."""
    environ = os.environ if environ is None else environ
    folder = Path(environ.get("DOCKER_CONFIG") or Path(environ.get("HOME") or "/root", ".docker"))
    if host := environ.get("DOCKER_HOST"):
        secure = bool(environ.get("DOCKER_TLS_VERIFY"))
        return parse(host, Path(environ.get("DOCKER_CERT_PATH") or folder) if secure else None)
    name = environ.get("DOCKER_CONTEXT") or _json(folder / "config.json").get("currentContext") or "default"
    if name != "default":
        return _of_context(folder, str(name))
    return Endpoint(path=_customary(environ))


def parse(address: str, certificates: Path | None = None) -> Endpoint:
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return Endpoint(path=parts.path)
    if parts.scheme in ("tcp", "http", "https") and parts.hostname and parts.path in ("", "/") and port != -1:
        if parts.scheme == "https" and certificates is None:
            raise _nonsense(address, "https needs DOCKER_TLS_VERIFY=1 and certificates")
        return Endpoint(
            host=parts.hostname, port=port or (_TLS_PORT if certificates else _PLAIN_PORT), certificates=certificates
        )
    if parts.scheme == "ssh":
        raise EngineUnavailableError(
            f"the Docker engine at '{address}' cannot be reached: ssh is not supported",
            hint="Forward its socket: 'ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST', "
            "then set DOCKER_HOST=unix:///tmp/docker.sock.",
        )
    raise _nonsense(address, "the address is invalid")


def _nonsense(address: str, reason: str) -> EngineUnavailableError:
    return EngineUnavailableError(f"the Docker engine at '{address[:200]}' cannot be reached: {reason}", hint=_HINT)


def _of_context(folder: Path, name: str) -> Endpoint:
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = _json(folder / "contexts" / "meta" / digest / "meta.json")
    docker = meta.get("Endpoints", {}).get("docker", {}) if isinstance(meta.get("Endpoints"), dict) else {}
    host = docker.get("Host") if isinstance(docker, dict) else None
    if not isinstance(host, str) or not host:
        raise EngineUnavailableError(
            f"there is no Docker context '{name}'", hint="'docker context ls' shows those that there are."
        )
    secrets = folder / "contexts" / "tls" / digest / "docker"
    return parse(host, secrets if secrets.is_dir() else None)


def _customary(environ: Mapping[str, str]) -> str:
    """Return the system's socket, or that of a rootless engine."""
    candidates = [DEFAULT_SOCKET]
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        candidates += [f"{runtime}/docker.sock", f"{runtime}/podman/podman.sock"]
    return next((path for path in candidates if os.path.exists(path)), DEFAULT_SOCKET)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
