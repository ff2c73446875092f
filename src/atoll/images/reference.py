"""Parsing of image references.

    host                                 this machine's own /usr, the default
    debian:SUITE, also debian:12-slim    a minimal Debian, built here
    recipe:NAME, or NAME of a recipe     a Debian with a list of packages, built here
    code, computer, browser              a ready-made environment, built here from a Dockerfile of Atoll
    [REGISTRY/]REPOSITORY[:TAG][@sha256:DIGEST]    an OCI image; the default registry is docker.io
    tar:/PATH                            a root file system, or a saved image, in a tar archive
    docker:NAME                          an image of the local Docker engine
    snapshot:ID, step:KEY                reserved

Parsing uses neither the file system nor the network, so the names of the recipes are passed in.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass

from atoll.errors import ImageNotFoundError, SpecError
from atoll.model import absolute_path

DEFAULT_REGISTRY = "docker.io"
ENVIRONMENTS = ("code", "computer", "browser")
"""The names of the ready-made environments. A user's recipe of the same name comes first, as for built-in recipes."""
SUITES = ("bullseye", "bookworm", "trixie", "forky", "sid", "oldstable", "stable", "testing", "unstable")

_DEBIAN_NAMES = {"11": "bullseye", "12": "bookworm", "13": "trixie", "14": "forky", "latest": "stable"}
_DEBIAN_TAG = re.compile(r"^([a-z]+|[0-9]{2})(?:\.[0-9]{1,2})?(?:-[0-9]{8})?(?:-slim)?\Z")
_MAX_LENGTH = 1024
_HINT = (
    "Images are: host, code, computer, browser, debian:SUITE, the name of a recipe, REGISTRY/NAME:TAG, tar:/PATH or"
    " docker:NAME."
)
_DOMAIN = re.compile(r"^(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?\Z")
_COMPONENT = re.compile(r"^[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*\Z")
_TAG = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}\Z")
_RECIPE = re.compile(r"^[a-z0-9][a-z0-9_.-]{0,62}\Z")


class Kind(enum.StrEnum):
    HOST = "host"
    DEBIAN = "debian"
    RECIPE = "recipe"
    ENVIRONMENT = "environment"
    OCI = "oci"
    TAR = "tar"
    DOCKER = "docker"


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed reference. `str()` returns the canonical spelling that the store uses as its name."""

    kind: Kind
    name: str
    """The suite, recipe, path, or repository without its registry."""
    registry: str = ""
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        if self.kind in (Kind.HOST, Kind.ENVIRONMENT):
            return self.name
        text = f"{self.registry}/{self.name}" if self.registry else self.name
        if self.digest:
            text = f"{text}@{self.digest}"
        elif self.tag:
            text = f"{text}:{self.tag}"
        return text if self.kind is Kind.OCI else f"{self.kind}:{text}"


def parse(text: str, recipes: Collection[str] = ()) -> Reference:
    """Parse a reference. Raises SpecError if it is invalid and ImageNotFoundError for an unknown suite or recipe."""
    if not text or len(text) > _MAX_LENGTH or not text.isprintable() or text != text.strip():
        raise SpecError(f"{text[:80]!r} is not an image", hint=_HINT)
    if text == "host":
        return Reference(Kind.HOST, "host")
    prefix, colon, rest = text.partition(":")
    if colon and prefix == "snapshot":
        raise SpecError("a snapshot cannot be used here; only a new sandbox can start from one", hint=_HINT)
    if colon and prefix == "step":
        raise SpecError("a step of a build cannot be used as an image", hint=_HINT)
    if colon and prefix == "debian" and rest in SUITES:
        return Reference(Kind.DEBIAN, rest)
    if colon and prefix == "recipe":
        return Reference(Kind.RECIPE, _recipe(rest, recipes))
    if colon and prefix == "tar":
        return Reference(Kind.TAR, _path(rest))
    if colon and prefix == "docker":
        return _docker(rest)
    if text in recipes:
        return Reference(Kind.RECIPE, text)
    if text in ENVIRONMENTS:
        return Reference(Kind.ENVIRONMENT, text)
    return _oci(text)


def valid_recipe_name(name: str) -> bool:
    return bool(_RECIPE.match(name)) and name != "host"


def is_loopback(registry: str) -> bool:
    """Return whether a registry is on this machine, so that plain HTTP to it does not cross a network."""
    for host in (registry, registry.rpartition(":")[0]):
        if host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def debian_suite(text: str) -> str:
    """Return the suite that a Debian image of the default registry has, such as `debian:12-slim`, or "" if the text
    names none of those that can be built here."""
    name, colon, tag = text.partition(":")
    found = _DEBIAN_TAG.match(tag if colon else "latest")
    if name != "debian" or found is None:
        return ""
    suite = _DEBIAN_NAMES.get(found[1], found[1])
    return suite if suite in SUITES else ""


def parse_name(text: str) -> Reference:
    """Parse the name of an image of a registry, whatever else this text means. Raises SpecError."""
    if not text or len(text) > _MAX_LENGTH or not text.isprintable() or text != text.strip():
        raise SpecError(f"{text[:80]!r} is not the name of an image", hint="Write a name such as mine or team/mine:1.")
    return _oci(text)


def _recipe(text: str, recipes: Collection[str]) -> str:
    if not valid_recipe_name(text):
        raise SpecError(
            f"{text[:80]!r} cannot be the name of a recipe", hint="Use lower case letters, digits, '-', '_', '.'."
        )
    if text not in recipes:
        raise ImageNotFoundError(
            f"there is no recipe {text!r}", hint=f"Recipes are: {', '.join(sorted(recipes)) or 'none'}."
        )
    return text


def _path(text: str) -> str:
    try:
        return absolute_path(text)
    except ValueError as error:
        raise SpecError(f"not an image: {error}", hint="Write tar:/absolute/path/file.tar.gz.") from error


def _docker(text: str) -> Reference:
    """Parse the name of a Docker engine's image, which may also be an image id. An id is not an OCI reference."""
    if re.match(r"^[0-9a-f]{12,64}\Z", text):
        return Reference(Kind.DOCKER, text)
    oci = _oci(text)
    return Reference(Kind.DOCKER, oci.name, oci.registry, oci.tag, oci.digest)


def _oci(text: str) -> Reference:
    rest, at, digest = text.partition("@")
    if at and not _DIGEST.match(digest):
        raise SpecError(f"{digest[:80]!r} is not a digest", hint="Write @sha256: and 64 hexadecimal digits.")
    first, slash, remainder = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry, rest = first, remainder
        if not _DOMAIN.match(registry):
            raise SpecError(f"{registry[:80]!r} is not the address of a registry", hint="Write HOST or HOST:PORT.")
    else:
        registry = DEFAULT_REGISTRY
    name, colon, tag = rest.partition(":")
    if registry == DEFAULT_REGISTRY and "/" not in name:
        name = f"library/{name}"
    if colon and not _TAG.match(tag):
        raise SpecError(f"{tag[:80]!r} is not a tag", hint="A tag is up to 128 letters, digits, '.', '_' and '-'.")
    if len(name) > 255 or not all(_COMPONENT.match(part) for part in name.split("/")):
        lower = " Names are lower case." if name != name.lower() else ""
        raise SpecError(f"{text[:80]!r} is not an image", hint=_HINT + lower)
    return Reference(Kind.OCI, name, registry, "" if digest else tag or "latest", digest)
