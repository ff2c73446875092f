"""What works on this machine, what is missing and what to do about it. Finds out; printing is the caller's."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.engines import registry
from atoll.engines.availability import Availability
from atoll.engines.machine import Machine, look
from atoll.errors import EngineUnavailableError
from atoll.settings import Settings


@dataclass(frozen=True, slots=True)
class Diagnosis:
    machine: Machine
    settings: Settings
    engines: tuple[Availability, ...]
    """Strongest first. Those that `auto` never picks come last."""
    auto: str | None
    """The engine that `auto` picks here."""
    auto_reasons: tuple[str, ...]
    """Why that one, and why none before it."""


def diagnose(settings: Settings) -> Diagnosis:
    """Try everything for real. Takes up to a few seconds, so not for an event loop."""
    engines = tuple(registry.probe_all(settings, thorough=True))
    try:
        engine, reasons = registry.auto(settings, thorough=True)
        picked: str | None = engine.name
    except EngineUnavailableError as error:
        picked, reasons = None, [error.reason]
    return Diagnosis(look(settings.data_dir), settings, engines, picked, tuple(reasons))
