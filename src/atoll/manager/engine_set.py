"""The engines of a manager: one object for each name, shared by all sandboxes, and what each engine declares."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress

from atoll.engines import registry
from atoll.engines.contract import Balancing, Engine, EngineDescription
from atoll.errors import SandboxError
from atoll.model import Capability, SandboxSpec
from atoll.settings import Settings

_log = logging.getLogger(__name__)


class EngineSet:
    """The engines by name. Each is created when it is first needed. An engine object that the caller passed in is never
    closed here."""

    def __init__(self, default: str | Engine, settings: Settings) -> None:
        self._settings = settings
        self._given = default if not isinstance(default, str) else None
        self._is_auto = default == "auto"
        if isinstance(default, str):
            default = registry.auto(settings)[0] if default == "auto" else registry.get(default, settings)
        self.default: Engine = default
        self._by_name: dict[str, Engine] = {default.name: default}
        self.used = {default.name}
        """The names of engines that have, or had, sandboxes of this manager."""
        self._described: dict[str, EngineDescription] = {}

    def name_for(self, spec: SandboxSpec) -> str:
        """Return the name of the engine for a sandbox that does not ask for one."""
        name = registry.auto_for(spec.isolation) if self._is_auto else "auto"
        return self.default.name if name == "auto" else name

    def get(self, name: str) -> Engine:
        """Return the engine of this name. Raises EngineNotFoundError."""
        name = registry.canonical(name)
        engine = self._by_name.get(name)
        if engine is None:
            engine = self._by_name[name] = registry.get(name, self._settings)
        return engine

    def changeable_limits(self, name: str) -> frozenset[str]:
        """Return the limits that the engine could change later when it last described itself."""
        described = self._described.get(registry.canonical(name))
        return frozenset() if described is None else described.changeable_limits

    async def describe(self, name: str) -> EngineDescription:
        """Ask the engine to describe itself. Raises EngineNotFoundError, EngineUnavailableError."""
        description = await self.get(name).describe()
        self._described[registry.canonical(name)] = description
        return description

    async def learn(self, name: str) -> None:
        """Ask the engine to describe itself, if it answers now."""
        with suppress(SandboxError):
            await self.describe(name)

    def declares(self, name: str, capability: Capability) -> bool:
        """Whether the engine declared this capability when it last described itself.

        An engine that has not answered yet may have every capability: it can refuse a pause that it cannot carry out,
        but a sandbox that was deleted instead of paused is lost.
        """
        described = self._described.get(registry.canonical(name))
        return described is None or not described.is_complete or capability in described.capabilities

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._by_name.values()))

    async def balance(self) -> None:
        """Let the engines that support it divide processor time between accounts, according to the use since the last
        call."""
        for engine in self:
            if isinstance(engine, Balancing) and engine.name in self.used:
                try:
                    await engine.balance()
                except (SandboxError, OSError) as error:
                    _log.warning("engine '%s' cannot share the processors: %s", engine.name, error)

    async def aclose(self) -> None:
        """Close all engines except one that the caller passed in. May be repeated."""
        for engine in self._by_name.values():
            if engine is not self._given:
                await engine.aclose()
