"""What works on this machine, what is missing and what to do about it. The caller prints it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.engines import registry
from atoll.engines.contract import Engine, IsolationLevels, LimitDefaults, supporting
from atoll.engines.host.machine import Machine, look
from atoll.errors import EngineUnavailableError
from atoll.model import Capability, EffectiveLimits, SandboxSpec
from atoll.model.state import Availability
from atoll.settings import Settings


@dataclass(frozen=True, slots=True)
class EngineLevel:
    """An engine on this machine, at one of its isolation levels."""

    engine: str
    isolation: str | None
    capabilities: frozenset[Capability]
    changeable_limits: frozenset[str]
    """The limits that can be changed while a sandbox runs, by their names in `Limits`."""
    missing: Mapping[Capability, str]
    """Why capabilities are missing, as far as the reasons are known."""


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
    levels: tuple[EngineLevel, ...] = ()
    """What the engines that work here can enforce and offer, at each of their isolation levels."""


def diagnose(settings: Settings) -> Diagnosis:
    """Try every engine for real. This blocks for up to a few seconds: do not call it in an event loop."""
    engines = tuple(registry.probe_all(settings, thorough=True))
    working = [registry.get(found.name, settings) for found in engines if found.available]
    levels = tuple(level for engine in working for level in asyncio.run(_levels(engine)))
    try:
        engine, reasons = registry.auto(settings, thorough=True)
        picked = engine.name
    except EngineUnavailableError as error:
        return Diagnosis(look(settings.data_dir), settings, engines, None, (error.reason,), levels=levels)
    limits, shared = asyncio.run(_limits(engine))
    return Diagnosis(look(settings.data_dir), settings, engines, picked, tuple(reasons), limits, shared, levels)


async def _levels(engine: Engine) -> list[EngineLevel]:
    try:
        several = await supporting(engine, IsolationLevels)
        described = [await engine.describe()] if several is None else (await several.levels()).values()
        return [
            EngineLevel(
                engine.name,
                each.isolation,
                each.capabilities,
                each.changeable_limits,
                {capability: why for capability, why in each.missing.items() if capability not in each.capabilities},
            )
            for each in described
        ]
    finally:
        await engine.aclose()


async def _limits(engine: Engine) -> tuple[EffectiveLimits | None, tuple[str, ...]]:
    if not isinstance(engine, LimitDefaults):
        return None, ()
    return await engine.default_limits(SandboxSpec()), await engine.shared_ceilings()
