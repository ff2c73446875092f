"""On whose behalf an image is pulled: where such a pull may connect to, and whose login it may use.

Whoever runs this program pulls from anywhere, with the logins of `docker login`. A server's users are somebody else:
what they name must not become a request to the server's own network, what is there must not come back in an error, and
the operator's logins are not theirs. The access is a context variable, because between a request and the pull that it
leads to there are a manager and an engine, which have no business with it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from atoll.errors import ImageError, SpecError
from atoll.images.registry_login import Credentials, credentials_for
from atoll.model.addresses import Address, Network, is_public


class UnreachableError(ImageError):
    """This pull may not connect to the registry, or to where it leads. The error says no more than that."""


@dataclass(frozen=True, slots=True)
class Access:
    guarded: bool = False
    """Only public addresses, except those listed below; no login except the user's own and shared ones."""
    registries: frozenset[str] = frozenset()
    """HOST or HOST:PORT that may be reached wherever they are."""
    networks: tuple[Network, ...] = ()
    """Ranges of addresses that may be reached though they are not public."""
    shared_logins: frozenset[str] = frozenset()
    """Registries for which everybody uses the operator's login."""
    login: Credentials | None = field(default=None, repr=False)
    """Of whoever asks, for the registry of the image."""

    def credentials(self, registry: str) -> Credentials | None:
        if self.login is not None:
            return self.login
        if self.guarded and registry not in self.shared_logins:
            return None
        return credentials_for(registry)

    def check(self, host: str, port: int, addresses: Iterable[Address]) -> None:
        """Raises UnreachableError if one of the addresses of a host may not be connected to."""
        if not self.guarded or host in self.registries or f"{host}:{port}" in self.registries:
            return
        for address in addresses:
            if not is_public(address) and not any(address in network for network in self.networks):
                raise unreachable(host)

    def connect(self, place: tuple[str, int], timeout_s: float, *_: object) -> socket.socket:
        """A connection to an address that was judged: nobody is asked twice what a name means."""
        host, port = place
        addresses = list(dict.fromkeys(self.resolve(host, port)))
        self.check(host, port, addresses)
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return socket.create_connection((str(address), port), timeout_s)
        return socket.create_connection((str(addresses[-1]), port), timeout_s)

    def resolve(self, host: str, port: int) -> list[Address]:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise unreachable(host) from error
        return [ipaddress.ip_address(str(place[4][0]).partition("%")[0]) for place in found]


def unreachable(host: str) -> UnreachableError:
    """The same whether there is no such name or it is one of the server's own network."""
    return UnreachableError(
        f"{host[:80]!r} cannot be reached, or is not public",
        hint="Check the name. An administrator can allow registries in the server's own network.",
    )


def parse_places(texts: Iterable[str]) -> tuple[frozenset[str], tuple[Network, ...]]:
    """Registries and ranges of addresses, as settings list them. Raises SpecError."""
    names, networks = set(), []
    for text in texts:
        if "/" in text:
            try:
                networks.append(ipaddress.ip_network(text))
            except ValueError as error:
                raise SpecError(f"{text!r} is neither HOST, HOST:PORT nor a range of addresses: {error}") from error
        elif text:
            names.add(text.lower())
    return frozenset(names), tuple(networks)


OPERATOR = Access()
"""Of whoever runs this program."""
_current: ContextVar[Access] = ContextVar("atoll-image-access", default=OPERATOR)


def current() -> Access:
    return _current.get()


@contextlib.contextmanager
def pulling_with(access: Access) -> Iterator[None]:
    """Pulls that are begun inside, and tasks that are, have this access."""
    token = _current.set(access)
    try:
        yield
    finally:
        _current.reset(token)
