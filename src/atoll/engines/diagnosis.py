"""What works on this machine, what is missing and what to do about it. The caller prints it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from atoll.engines import registry
from atoll.engines.contract import Engine, LimitDefaults
from atoll.engines.host.machine import Machine, look
from atoll.errors import EngineUnavailableError
from atoll.model import EffectiveLimits, SandboxSpec
from atoll.model.state import Availability
from atoll.settings import Settings


@dataclass(frozen=True, slots=True)
class Diagnosis:
    machine: Machine
    settings: Settings
    engines: tuple[Availability, ...]
    """The engines, the strongest first. Those that `auto` never picks come last."""
    auto: str | None
    """The engine that `auto` picks here."""
    auto_reasons: tuple[str, ...]
    """Why `auto` picks that engine, and why none before it."""
    limits: EffectiveLimits | None = None
    """The limits that a sandbox has on that engine if it asks for none."""
    shared: tuple[str, ...] = ()
    """What that engine limits for all sandboxes of an account, and of the installation, together."""


def diagnose(settings: Settings) -> Diagnosis:
    """Try every engine for real. This blocks for up to a few seconds: do not call it in an event loop."""
    engines = tuple(registry.probe_all(settings, thorough=True))
    try:
        engine, reasons = registry.auto(settings, thorough=True)
        picked = engine.name
    except EngineUnavailableError as error:
        return Diagnosis(look(settings.data_dir), settings, engines, None, (error.reason,))
    limits, shared = asyncio.run(_limits(engine))
    return Diagnosis(look(settings.data_dir), settings, engines, picked, tuple(reasons), limits, shared)


async def _limits(engine: Engine) -> tuple[EffectiveLimits | None, tuple[str, ...]]:
    if not isinstance(engine, LimitDefaults):
        return None, ()
    return await engine.default_limits(SandboxSpec()), await engine.shared_ceilings()
