"""Mirrors of registries, which are asked before the registry of an image itself.

The operator chooses them, so they are reached at any address, by every user. A mirror is written `HOST[:PORT]`, with
`http://` before it if it has no TLS. It mirrors the default registry, or another one: `REGISTRY=MIRROR`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from atoll.errors import SpecError
from atoll.images.reference import DEFAULT_REGISTRY, is_loopback

_HOST = re.compile(r"^(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?\Z")


@dataclass(frozen=True, slots=True)
class Mirror:
    registry: str
    """The registry whose images it has."""
    host: str
    plain_http: bool = False


def parse_mirrors(texts: Iterable[str]) -> tuple[Mirror, ...]:
    """Parse the setting. Raises SpecError."""
    return tuple(_parse(text.strip()) for text in texts if text.strip())


def _parse(text: str) -> Mirror:
    first, equals, rest = text.partition("=")
    registry, place = (first, rest) if equals else (DEFAULT_REGISTRY, text)
    scheme, found, host = place.partition("://")
    if not found:
        scheme, host = "", place
    host = host.rstrip("/")
    if scheme not in ("", "http", "https") or not _HOST.match(host) or not _HOST.match(registry):
        raise SpecError(
            f"{text[:120]!r} is not a mirror of a registry", hint="Write HOST[:PORT], or REGISTRY=http://HOST:PORT."
        )
    return Mirror(registry, host, scheme == "http" or (not scheme and is_loopback(host)))
