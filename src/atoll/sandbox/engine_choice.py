"""The engine that a sandbox runs on: an object passed by the caller, or an engine chosen by name and shared with other
sandboxes of the program."""

from __future__ import annotations

import os

from atoll.engines import leases, registry
from atoll.engines.contract import Engine
from atoll.errors import SpecError
from atoll.settings import Settings


class EngineChoice:
    """An engine, created when it is first needed if it was given by name. With a server it is the engine `remote`."""

    def __init__(self, engine: str | Engine, server: str | None, api_key: str | None, settings: Settings) -> None:
        if server is None and api_key is None and engine == "auto":
            server = os.environ.get("ATOLL_URL") or None
        if server is not None or api_key is not None:
            if engine not in ("auto", "remote"):
                raise SpecError(f"give either a server or the engine {engine!r}, not both")
            engine = "remote"
        self.server, self.api_key, self.settings = server, api_key, settings
        self.name = registry.canonical(engine) if isinstance(engine, str) else engine.name
        self.lease: leases.EngineLease | None = None
        """The shared use of a named engine. An engine object that was passed in is not shared: its caller owns it."""
        self._engine: Engine | None = engine if not isinstance(engine, str) else None

    async def engine(self, isolation: str | None) -> Engine:
        """Return the engine, created if necessary, for a sandbox that requests this isolation level."""
        if self._engine is None:
            self.lease = await leases.acquire(self._wanted(isolation), self.settings, self.server, self.api_key)
            self._engine = self.lease.engine
        return self._engine

    def engine_name(self, isolation: str | None) -> str:
        """Return the name of the engine, which need not have been created yet."""
        if self._engine is not None:
            return self._engine.name
        name = self._wanted(isolation)
        return registry.auto(self.settings)[0].name if name == "auto" else name

    def candidates(self) -> list[EngineChoice]:
        """Return the engines that may have an existing sandbox."""
        if self.name != "auto":
            return [self]
        return [EngineChoice(name, self.server, self.api_key, self.settings) for name in registry.auto_names()]

    def shared(self) -> str | Engine:
        """Return the engine, or its name, for another sandbox on the same engine."""
        if self.lease is None and self._engine is not None:
            return self._engine
        return self.name

    def release(self) -> None:
        """End the use of a shared, named engine. May be repeated."""
        if self.lease is not None:
            leases.release(self.lease)
            self.lease = None

    def _wanted(self, isolation: str | None) -> str:
        return registry.auto_for(isolation) if self.name == "auto" else self.name
