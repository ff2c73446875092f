"""Specs that have names of their own and need not be created: in the SDK, on the command line and in the catalogue of
every server."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from atoll.errors import SpecError

MANUS: Mapping[str, Any] = MappingProxyType(
    {
        "image": "computer",
        "cpus": 2.0,
        "memory": "4g",
        "disk": "20g",
        "shm": "1g",
        "lifetime": 3600.0,
        "network": {"allowed_domains": ["*"]},
    }
)
"""The sandbox of the Manus example: a computer with a browser, for one hour at most, which may reach every public
host."""
NAMED: Mapping[str, Mapping[str, Any]] = MappingProxyType({"manus": MANUS})
"""The options of each named spec."""


def options_of(name: str) -> dict[str, Any]:
    """Return the options of the spec of this name. Raises SpecError."""
    if name not in NAMED:
        raise SpecError(f"there is no spec {name[:80]!r}", hint=f"Named specs are: {', '.join(NAMED)}.")
    return dict(NAMED[name])
