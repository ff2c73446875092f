"""The access of a pull: which addresses it may connect to, and which registry login it may use.

The operator may pull from anywhere, with the logins of `docker login`. Users of a server are less trusted: an image
that they name must not cause a request to the server's own network, an error must not reveal what is there, and they
may not use the operator's logins. The access is a context variable, because the manager and the engine between a
request and the resulting pull do not need to know it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from atoll.errors import ImageUnreachableError, SpecError
from atoll.images.registry_login import Credentials, credentials_for
from atoll.model.addresses import Address, Network, is_public


@dataclass(frozen=True, slots=True)
class Access:
    guarded: bool = False
    """Whether only public addresses and those listed below are allowed, and only the user's own and shared logins."""
    registries: frozenset[str] = frozenset()
    """Registries (HOST or HOST:PORT) that are allowed at any address."""
    networks: tuple[Network, ...] = ()
    """Ranges of addresses that are allowed although they are not public."""
    shared_logins: frozenset[str] = frozenset()
    """Registries for which every user may use the operator's login."""
    login: Credentials | None = field(default=None, repr=False)
    """The user's own login for the registry of the image."""
    owner: str = ""
    """The user of a server whom images will belong to, and whose images are found. "": only those of everybody."""
    most_bytes: int | None = None
    """How much the images of the owner may take. None: no limit."""
    most_images: int | None = None
    """How many images the owner may have. None: no limit."""

    def at_mirror(self, host: str) -> Access:
        """Return the access to a mirror, which the operator chose: it is reached at any address, without the login."""
        return dataclasses.replace(self, login=None, registries=self.registries | {host})

    def credentials(self, registry: str) -> Credentials | None:
        if self.login is not None:
            return self.login
        if self.guarded and registry not in self.shared_logins:
            return None
        return credentials_for(registry)

    def check(self, host: str, port: int, addresses: Iterable[Address]) -> None:
        """Raise ImageUnreachableError if any of the addresses of a host is not allowed."""
        if not self.guarded or host in self.registries or f"{host}:{port}" in self.registries:
            return
        for address in addresses:
            if not is_public(address) and not any(address in network for network in self.networks):
                raise unreachable(host)

    def connect(self, place: tuple[str, int], timeout_s: float, *_: object) -> socket.socket:
        """Resolve a host name once, check its addresses, and connect to one of them.

        A second lookup by the HTTP client could return an address that was not checked.
        """
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


def unreachable(host: str) -> ImageUnreachableError:
    """Return the same error for a name that does not exist and for one in the server's own network."""
    return ImageUnreachableError(
        f"{host[:80]!r} cannot be reached, or is not public",
        hint="Check the name. An administrator can allow registries in the server's own network.",
    )


def parse_places(texts: Iterable[str]) -> tuple[frozenset[str], tuple[Network, ...]]:
    """Parse a list of registries and ranges of addresses from the settings. Raises SpecError."""
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
"""The access of the operator who runs this program."""
_current: ContextVar[Access] = ContextVar("atoll-image-access", default=OPERATOR)


def current() -> Access:
    return _current.get()


@contextlib.contextmanager
def pulling_with(access: Access) -> Iterator[None]:
    """Use this access for all pulls and tasks that are started in this context."""
    token = _current.set(access)
    try:
        yield
    finally:
        _current.reset(token)
