"""The engines of a manager: one object for each name, shared by all its sandboxes."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.engines import registry
from atoll.engines.base import Engine
from atoll.model import SandboxSpec
from atoll.settings import Settings


class Engines:
    """Each is made when it is first needed. One that was handed to us serves under its name and is not closed by us."""

    def __init__(self, default: str | Engine, settings: Settings) -> None:
        self._settings = settings
        self._given = default if not isinstance(default, str) else None
        self._is_auto = default == "auto"
        if isinstance(default, str):
            default = registry.auto(settings)[0] if default == "auto" else registry.get(default, settings)
        self.default: Engine = default
        self._by_name: dict[str, Engine] = {default.name: default}
        self.used = {default.name}
        """The names of those that have, or had, sandboxes of ours."""

    def name_for(self, spec: SandboxSpec) -> str:
        """The engine for a sandbox that asks for none by name."""
        name = registry.auto_for(spec.isolation) if self._is_auto else "auto"
        return self.default.name if name == "auto" else name

    def get(self, name: str) -> Engine:
        """Raises EngineNotFoundError."""
        engine = self._by_name.get(name)
        if engine is None:
            engine = self._by_name[name] = registry.get(name, self._settings)
        return engine

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._by_name.values()))

    async def aclose(self) -> None:
        """May be repeated."""
        for engine in self._by_name.values():
            if engine is not self._given:
                await engine.aclose()
