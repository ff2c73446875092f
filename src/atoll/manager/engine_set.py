"""The engines of a manager: one object for each name, shared by all its sandboxes, and what can be asked of each."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from atoll.engines import registry
from atoll.engines.contract import Balancing, Engine, EngineDescription
from atoll.errors import SandboxError
from atoll.model import Capability, SandboxSpec
from atoll.settings import Settings

_log = logging.getLogger(__name__)


class EngineSet:
    """Each engine is made when it is first needed. One that was handed to us is not closed by us."""

    def __init__(self, default: str | Engine, settings: Settings) -> None:
        self._settings = settings
        self._given = default if not isinstance(default, str) else None
        self._is_auto = default == "auto"
        if isinstance(default, str):
            default = registry.auto(settings)[0] if default == "auto" else registry.get(default, settings)
        self.default: Engine = default
        self._by_name: dict[str, Engine] = {default.name: default}
        self.used = {default.name}
        """The names of engines that have, or had, sandboxes of ours."""
        self._capabilities: dict[str, frozenset[Capability]] = {}

    def name_for(self, spec: SandboxSpec) -> str:
        """The name of the engine for a sandbox that asks for none."""
        name = registry.auto_for(spec.isolation) if self._is_auto else "auto"
        return self.default.name if name == "auto" else name

    def get(self, name: str) -> Engine:
        """The engine of that name. Raises EngineNotFoundError."""
        name = registry.canonical(name)
        engine = self._by_name.get(name)
        if engine is None:
            engine = self._by_name[name] = registry.get(name, self._settings)
        return engine

    async def describe(self, name: str) -> EngineDescription:
        """Raises EngineNotFoundError, EngineUnavailableError."""
        description = await self.get(name).describe()
        self._capabilities[name] = description.capabilities
        return description

    def declares(self, name: str, capability: Capability) -> bool:
        """As the engine described itself last. Nothing that never described itself has sandboxes of ours."""
        return capability in self._capabilities.get(name, ())

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._by_name.values()))

    async def balance(self) -> None:
        """Let engines that can do so share the processors between accounts, by what was used since the last call."""
        for engine in self:
            if isinstance(engine, Balancing) and engine.name in self.used:
                try:
                    await engine.balance()
                except (SandboxError, OSError) as error:
                    _log.warning("engine '%s' cannot share the processors: %s", engine.name, error)

    async def aclose(self) -> None:
        """May be repeated."""
        for engine in self._by_name.values():
            if engine is not self._given:
                await engine.aclose()
