"""The engines by name. The module of an engine is imported when the engine is first needed."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from atoll.engines.contract import Engine
from atoll.errors import EngineNotFoundError, EngineUnavailableError
from atoll.model.spelling import nearest
from atoll.model.state import Availability
from atoll.settings import Settings


class EngineClass(Protocol):
    """The part of an engine that belongs to its class."""

    def __call__(self, settings: Settings) -> Engine: ...

    def probe(self, settings: Settings, *, thorough: bool) -> Availability:
        """Return whether the engine can work here. With `thorough` it is tried for real; otherwise the check takes
        about a millisecond."""


_STRONGEST_FIRST = {
    "native": "atoll.engines.linux.native_engine:NativeEngine",
    "oci": "atoll.engines.linux.oci_engine:OciEngine",
    "bubblewrap": "atoll.engines.bubblewrap.engine:BubblewrapEngine",
}
_ONLY_BY_NAME = {
    "docker": "atoll.engines.docker.engine:DockerEngine",
    "unsafe-none": "atoll.engines.unsafe_none:UnsafeEngine",
}
_ALIASES = {"process": "bubblewrap"}
"""Other names of engines, which are accepted wherever an engine is named."""
_BY_ISOLATION = {"gvisor": "oci", "vm": "oci"}
"""The engines among those `auto` chooses from that offer more than namespaces, by isolation level."""
_ENGINES = _STRONGEST_FIRST | _ONLY_BY_NAME
_ELSEWHERE = {
    "remote": "atoll.engines.remote.engine:RemoteEngine",
}
"""Engines of other machines, which are only found by name."""


def canonical(name: str) -> str:
    """Return the engine's own name for any of its names."""
    return _ALIASES.get(name, name)


def oldest_name(name: str) -> str:
    """Return the engine's first name, for texts that must equal what earlier versions wrote."""
    return next((alias for alias, engine in _ALIASES.items() if engine == name), name)


def names() -> list[str]:
    return list(_ENGINES)


def get(name: str, settings: Settings) -> Engine:
    """Return the engine of that name. It may still refuse to work on this machine when it is used."""
    return _engine_class(name)(settings)


def remote(settings: Settings, url: str | None, api_key: str | None, **options: float) -> Engine:
    """Return an engine for the sandboxes of a server. The defaults come from ATOLL_URL and ATOLL_API_KEY."""
    try:
        from atoll.engines.remote.engine import RemoteEngine
    except ImportError as error:
        raise EngineUnavailableError(
            f"using a server needs more packages: {error}", hint="pip install 'atoll[client]'"
        ) from error
    return cast(Engine, RemoteEngine(settings, url=url, api_key=api_key, **options))  # type: ignore[arg-type]


def auto_for(isolation: str | None) -> str:
    """Return the name of the engine that `auto` means for this isolation level: `auto` itself, or the only engine that
    may offer it.

    Whether that engine offers it on this machine becomes known when it is used. Another isolation level is never used
    instead.
    """
    return _BY_ISOLATION.get(isolation or "", "auto")


def auto(settings: Settings, *, thorough: bool = False) -> tuple[Engine, list[str]]:
    """Return the strongest engine that works here, and the reasons why it was chosen and others were not. It always
    isolates."""
    reasons: list[str] = []
    hints: list[str] = []
    for name in _STRONGEST_FIRST:
        found = probe(name, settings, thorough=thorough)
        if found.available:
            reasons.append(f"{name}: the strongest isolation that works here")
            return get(name, settings), reasons
        reasons.extend(f"{name}: {reason}" for reason in found.reasons)
        hints.extend(found.hints)
    raise EngineUnavailableError(
        "no engine with isolation works on this machine: " + "; ".join(reasons),
        hint=" ".join([*hints, "'atoll doctor' says more."]),
    )


def probe(name: str, settings: Settings, *, thorough: bool = False) -> Availability:
    return _engine_class(name).probe(settings, thorough=thorough)


def probe_all(settings: Settings, *, thorough: bool = True) -> list[Availability]:
    return [probe(name, settings, thorough=thorough) for name in _ENGINES]


def _engine_class(name: str) -> EngineClass:
    location = (_ENGINES | _ELSEWHERE).get(canonical(name))
    if location is None:
        near = nearest(name, [*_ENGINES, *_ALIASES, *_ELSEWHERE, "auto"])
        meant = f"Did you mean '{near}'? " if near else ""
        raise EngineNotFoundError(
            f"there is no engine '{name}'",
            hint=f"{meant}Known engines: {', '.join(_ENGINES)}; or 'auto' for the first of "
            f"{', '.join(_STRONGEST_FIRST)} that works here.",
        )
    module, _, attribute = location.partition(":")
    return cast(EngineClass, getattr(importlib.import_module(module), attribute))
