"""The engines by name. An engine's module is imported when the engine is asked for."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from atoll.engines.contract import Availability, Engine
from atoll.errors import EngineNotFoundError, EngineUnavailableError
from atoll.settings import Settings


class EngineClass(Protocol):
    """What an engine's class offers besides its instances."""

    def __call__(self, settings: Settings) -> Engine: ...

    def probe(self, settings: Settings, *, thorough: bool) -> Availability:
        """Whether it can work here. `thorough` tries it for real; otherwise it only looks, in about a millisecond."""


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
"""Other names of engines, which work wherever an engine is named."""
_BY_ISOLATION = {"gvisor": "oci", "vm": "oci"}
"""Which of those that `auto` may pick can give more than namespaces."""
_ENGINES = _STRONGEST_FIRST | _ONLY_BY_NAME
_ELSEWHERE = {
    "remote": "atoll.engines.remote.engine:RemoteEngine",
}
"""Those that are not of this machine are found by name alone."""


def canonical(name: str) -> str:
    """The engine's own name, if this is another name of it."""
    return _ALIASES.get(name, name)


def oldest_name(name: str) -> str:
    """The engine's first name, which earlier versions wrote where this one has to find the same text."""
    return next((alias for alias, engine in _ALIASES.items() if engine == name), name)


def names() -> list[str]:
    return list(_ENGINES)


def get(name: str, settings: Settings) -> Engine:
    """The engine of that name. It may still refuse to work on this machine, when it is used."""
    return _engine_class(name)(settings)


def remote(settings: Settings, url: str | None, api_key: str | None, **options: float) -> Engine:
    """The sandboxes of a server; what is not given comes from ATOLL_URL and ATOLL_API_KEY."""
    try:
        from atoll.engines.remote.engine import RemoteEngine
    except ImportError as error:
        raise EngineUnavailableError(
            f"using a server needs more packages: {error}", hint="pip install 'atoll[client]'"
        ) from error
    return cast(Engine, RemoteEngine(settings, url=url, api_key=api_key, **options))  # type: ignore[arg-type]


def auto_for(isolation: str | None) -> str:
    """The name of the engine that `auto` means for this isolation: `auto` itself, or the only one that may have it.
    Whether it does have it here shows when it is used; another kind of isolation is never taken instead."""
    return _BY_ISOLATION.get(isolation or "", "auto")


def auto_names() -> list[str]:
    """The engines on which a sandbox that was made on `auto` may be, with any isolation."""
    return ["auto", *dict.fromkeys(_BY_ISOLATION.values())]


def auto(settings: Settings, *, thorough: bool = False) -> tuple[Engine, list[str]]:
    """The strongest engine that works here, and why it and none before it. Never one without isolation."""
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
        raise EngineNotFoundError(
            f"there is no engine '{name}'",
            hint=f"Known engines: {', '.join(_ENGINES)}; or 'auto' for the strongest that works here.",
        )
    module, _, attribute = location.partition(":")
    return cast(EngineClass, getattr(importlib.import_module(module), attribute))
