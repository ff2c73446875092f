"""What the configuration of one package manager amounts to, and the rules that let a sandbox reach its hosts."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from atoll.model.addresses import Address, closed_for_all, is_private, name_of_words
from atoll.model.network_policy import Rule

HOME = "/run/atoll-build"
"""The directory of the files, which no image has."""
_PORTS = {"http": 80, "https": 443}
_PROGRAM_S = 20.0
_MAX_OUTPUT = 4 << 20
_SCHEME = re.compile(r"^https?://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int
    protocol: Literal["web", "tcp"] = "web"
    """`tcp` for proxies: what is said to them names other hosts than themselves."""


@dataclass(frozen=True, slots=True)
class Login:
    """The credentials for one host."""

    host: str
    name: str = field(repr=False)
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Found:
    """What the configuration of one package manager says."""

    endpoints: tuple[Endpoint, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    complete: bool = True
    """Whether all hosts are known that the package manager connects to."""

    def only(self, hosts: frozenset[str]) -> Found:
        """Return this, or nothing if it needs a host that is not among these."""
        return self if all(each.host in hosts for each in self.endpoints) else Found(notes=self.notes)

    @classmethod
    def joined(cls, parts: Sequence[Found]) -> Found:
        return cls(
            endpoints=tuple(each for part in parts for each in part.endpoints),
            variables={name: value for part in parts for name, value in part.variables.items()},
            files=_files(parts),
            secrets=tuple(secret for part in parts for secret in part.secrets if len(secret) > 3),
            notes=tuple(note for part in parts for note in part.notes),
        )


def _files(parts: Sequence[Found]) -> dict[str, bytes]:
    """Return the files of all parts. One that several have, such as the netrc, is put together."""
    files: dict[str, bytes] = {}
    for part in parts:
        for path, content in part.files.items():
            files[path] = files.get(path, b"") + content
    return files


@dataclass(frozen=True, slots=True)
class MirrorUrl:
    """A URL without its credentials, and these."""

    url: str
    endpoint: Endpoint
    login: Login | None


def parse_url(url: str) -> MirrorUrl | None:
    """Parse the URL of a mirror or a proxy. None for a URL that cannot be reached from a sandbox, such as file://."""
    if not _SCHEME.match(url):
        return None
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme.lower()]
        host = _host(parts)
    except (ValueError, KeyError):
        return None
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    login = None
    if parts.username:
        login = Login(host, unquote(parts.username), unquote(parts.password or ""))
    return MirrorUrl(bare, Endpoint(host, port), login)


def _host(parts: SplitResult) -> str:
    host = parts.hostname or ""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return name_of_words(host)


def rules_for(endpoints: Iterable[Endpoint]) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """Return the rules that allow exactly these endpoints, and notes on those that no sandbox can reach.

    A host with a private address gets a second rule: only what the first one allows may lead there.
    """
    rules: dict[Rule, None] = {}
    notes = []
    for each in dict.fromkeys(endpoints):
        addresses = addresses_of(each.host)
        if any(closed_for_all(address) for address in addresses):
            notes.append(f"{each.host} is this machine itself, which no sandbox reaches")
            continue
        is_address = _is_address(each.host)
        if not is_address:
            rules[Rule(domain=each.host, ports=((each.port, each.port),), protocol=each.protocol)] = None
        for address in addresses:
            if is_address or is_private(address):
                protocol = "tcp" if is_address else each.protocol
                rules[Rule(cidr=str(address), ports=((each.port, each.port),), protocol=protocol)] = None
    return tuple(rules), tuple(notes)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def addresses_of(host: str) -> list[Address]:
    """Return the addresses of a host. Empty if it cannot be resolved here."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(ipaddress.ip_address(str(place[4][0]).partition("%")[0]) for place in found))


def netrc(logins: Iterable[Login]) -> bytes:
    """Return credentials in the format of a netrc file, which apt, pip and curl read."""
    return "".join(f"machine {each.host} login {each.name} password {each.password}\n" for each in logins).encode()


def output_of(argv: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return what a program of this machine prints, or None if it fails or is not there."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            timeout=_PROGRAM_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env=dict(environ),
            cwd="/",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout[:_MAX_OUTPUT].decode("utf-8", "replace")


def read_text(path: str) -> str:
    """Return the text of a file of this machine, or an empty text if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_OUTPUT) if os.path.isfile(path) else ""
    except OSError:
        return ""


def proxies(environ: Mapping[str, str]) -> Found:
    """Return the proxies that variables of the environment name."""
    variables, endpoints, secrets = {}, [], []
    for name in ("http_proxy", "https_proxy"):
        value = environ.get(name) or environ.get(name.upper()) or ""
        parsed = parse_url(value if "://" in value else f"http://{value}") if value else None
        if parsed is not None:
            variables[name] = variables[name.upper()] = value
            endpoints.append(Endpoint(parsed.endpoint.host, parsed.endpoint.port, "tcp"))
            secrets += [parsed.login.password] if parsed.login is not None else []
    if variables and (direct := environ.get("no_proxy") or environ.get("NO_PROXY")):
        variables["no_proxy"] = variables["NO_PROXY"] = direct
    return Found(tuple(endpoints), variables, {}, tuple(secrets))
