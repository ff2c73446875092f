"""A manager's parts, put together and taken apart in order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from atoll.engines.base import Announcing
from atoll.errors import SandboxError
from atoll.manager.balancing import balance
from atoll.manager.clock import Clock
from atoll.manager.core import Core, Rules
from atoll.manager.creating import Creating
from atoll.manager.ending import Ending
from atoll.manager.engines import Engines
from atoll.manager.forking import Forking
from atoll.manager.health import Health
from atoll.manager.journal import Journal
from atoll.manager.ledger import Ledger, OnEvent
from atoll.manager.members import Members
from atoll.manager.observing import Observing
from atoll.manager.orphans import Orphans
from atoll.manager.pausing import Pausing
from atoll.manager.pool import PoolSettings
from atoll.manager.pools import Pools
from atoll.manager.queries import Queries
from atoll.manager.reaper import Reaper
from atoll.manager.recovery import Recovered, Recovery
from atoll.manager.refusals import Refusals
from atoll.manager.retention import Retention
from atoll.manager.room import Room
from atoll.manager.state_directory import StateDirectory
from atoll.manager.watching import Watching
from atoll.settings import Settings

_CLOSE_S = 5.0


class Parts:
    def __init__(
        self,
        rules: Rules,
        engines: Engines,
        settings: Settings,
        clock: Clock,
        state_dir: Path,
        pools: Iterable[PoolSettings],
        power_safe: bool,
        retention: Retention | None = None,
    ) -> None:
        self.recovered = Recovered()
        self._loop = asyncio.get_running_loop()
        self._directory = StateDirectory(state_dir)
        self._journal = Journal(state_dir / "manager.db", power_safe=power_safe, retention=retention)
        members = Members()
        ledger = Ledger(self._journal, members, clock)
        core = self.core = Core(rules, engines, settings, clock, self._journal, members, ledger)
        core.health, core.ending = Health(core), Ending(core)
        room = Room(core)
        core.pausing = Pausing(core, room)
        self.pools = Pools(core, pools)
        self.creating = Creating(core, room, self.pools)
        core.forking = Forking(core, room, self.creating)
        self.reaper = Reaper(core, self.pools)
        self.queries = Queries(core, self.pools)
        self.orphans = Orphans(core)
        self.watching = Watching(core)
        self.observing = Observing(core)

    async def open(self, on_event: OnEvent | None) -> None:
        """Either everything is open and recovered afterwards, or nothing is held."""
        if on_event is not None:
            self.core.ledger.listeners.append(on_event)
        self.core.mark = self._directory.open()
        try:
            await self._journal.open()
            self.recovered = await Recovery(self.core, self.pools).run()
        except BaseException:
            await self.aclose()
            raise
        self.pools.start()
        self.watching.go_on()
        self.core.tasks.spawn(Refusals(self.core).run(), "refusals")
        self.core.tasks.spawn(self.orphans.run(), "orphans")
        self.core.tasks.spawn(balance(self.core), "balance")
        for engine in self.core.engines:
            if isinstance(engine, Announcing):
                engine.announce(self._happened)

    def _happened(self, sandbox_id: str) -> None:
        """On the engine's side, to one of its sandboxes. What it was is asked."""
        core, member = self.core, self.core.members.find(sandbox_id)
        if member is not None and member.free and not core.closing:
            core.tasks.spawn(core.health.look(member), f"look at {sandbox_id}")

    async def aclose(self) -> list[str]:
        """Let go of everything but the sandboxes and the engine. The names of tasks that would not end."""
        self.core.closing = True
        stuck = await self.core.tasks.aclose(_CLOSE_S)
        for member in self.core.members:
            await member.sandbox.let_go()
        await self._journal.aclose()
        self._directory.close()
        return stuck

    def check_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            raise SandboxError("this manager belongs to another event loop", hint="Make one for each event loop.")
