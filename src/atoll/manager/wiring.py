"""Create the parts of a manager in the order of their dependencies, open them, and close them again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from atoll import tracing
from atoll.engines.contract import Engine, EventSource
from atoll.manager.capacity import Capacity
from atoll.manager.context import ManagerContext
from atoll.manager.engine_set import EngineSet
from atoll.manager.health import Health
from atoll.manager.journal import Journal
from atoll.manager.members import Member, Members
from atoll.manager.operations.create import Creator
from atoll.manager.operations.delete import Deleter
from atoll.manager.operations.fork import Forker
from atoll.manager.operations.pause import Pauser
from atoll.manager.pool import Pools, PoolSettings
from atoll.manager.reaper import Reaper
from atoll.manager.record import PausedBy
from atoll.manager.recovery import OrphanCollector, Recovered, Recovery
from atoll.manager.request import Request
from atoll.manager.rules import Retention, Rules
from atoll.manager.schedule import Schedule
from atoll.manager.state_directory import StateDirectory
from atoll.manager.supervisor import MemberFactory
from atoll.manager.transitions import OnEvent, Transitions
from atoll.manager.watchers import CommandWatcher, RefusalWatcher
from atoll.model import Cause
from atoll.settings import Settings
from atoll.timer import Clock

_CLOSE_S = 5.0
_BALANCE_EVERY_S = 0.5


@dataclass(slots=True)
class Shutdown:
    """What became of the sandboxes at a shutdown. Those that were not deleted in time are deleted at the next start."""

    deleted: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    stuck: list[str] = field(default_factory=list)
    """Names of tasks that did not end when they were cancelled."""


class Wiring:
    """The parts of one manager. It also implements the `Operations` that lower parts need, so every cycle goes through
    here."""

    def __init__(
        self,
        context: ManagerContext,
        directory: StateDirectory,
        pools: Iterable[PoolSettings],
        on_event: OnEvent | None,
    ) -> None:
        self.recovered = Recovered()
        self.context = context
        self._directory = directory
        self.schedule = Schedule(context)
        self.health = Health(context)
        self.factory = MemberFactory(context, self.health, self)
        self.pools = Pools(context, self, pools)
        capacity = Capacity(context, self, self.pools)
        self.deleter = Deleter(context, self.schedule)
        self.pauser = Pauser(context, capacity, self.health)
        self.creator = Creator(context, self.schedule, self.factory, self.pools, capacity, self.deleter)
        self.forker = Forker(context, self.factory, capacity, self.creator)
        self.reaper = Reaper(context, self.schedule, self.health, self.deleter, self.pauser, self.pools)
        self.orphans = OrphanCollector(context)
        self.commands = CommandWatcher(context, self.health)
        listeners = (self.pools.on_event, self.schedule.on_event, on_event)
        context.transitions.listeners += [each for each in listeners if each is not None]

    @classmethod
    async def open(
        cls,
        *,
        rules: Rules,
        engine: str | Engine,
        settings: Settings,
        clock: Clock,
        state_dir: Path,
        pools: Iterable[PoolSettings],
        power_safe: bool,
        retention: Retention | None,
        on_event: OnEvent | None,
        on_use: Callable[[str], None],
    ) -> Self:
        """Open and recover everything. If that fails, nothing stays open."""
        engines, directory = EngineSet(engine, settings), StateDirectory(state_dir)
        try:
            manager_id = directory.open()
            journal = Journal(state_dir / "manager.db", power_safe=power_safe, retention=retention)
            members = Members()
            transitions = Transitions(journal, members, clock)
            context = ManagerContext(rules, engines, settings, clock, journal, members, transitions, manager_id, on_use)
            wiring = cls(context, directory, pools, on_event)
            await wiring._start()
        except BaseException:
            directory.close()
            await engines.aclose()
            raise
        return wiring

    async def _start(self) -> None:
        context, tasks = self.context, self.context.tasks
        try:
            await context.journal.open()
            recovery = Recovery(context, self.factory, self.health, self.deleter, self.pools)
            self.recovered = await recovery.run()
        except BaseException:
            await self._close()
            raise
        with tracing.apart():  # what they do later is not done for whoever uses the manager first
            self.pools.start(self.creator.make_spare)
            self.commands.go_on()
            tasks.spawn(RefusalWatcher(context).run(), "refusals")
            tasks.spawn(self.orphans.run(), "orphans")
            tasks.spawn(self._balance(), "balance")
            for engine in context.engines:
                if isinstance(engine, EventSource):
                    engine.announce(self._happened)

    def _happened(self, sandbox_id: str) -> None:
        """Look at a sandbox because its engine reports that something happened to it."""
        context, member = self.context, self.context.members.find(sandbox_id)
        if member is not None and member.free and not context.closing:
            context.tasks.spawn(self.health.look(member), f"look at {sandbox_id}")

    async def _balance(self) -> None:
        """Balance the engines periodically. Never returns."""
        while True:
            await asyncio.sleep(_BALANCE_EVERY_S)
            if any(member.record.owner for member in self.context.members):
                await self.context.engines.balance()  # without owners there is only one user, so nothing to balance

    # --- operations -----------------------------------------------------------------------------------------------

    async def delete(self, member: Member, cause: Cause, reason: str) -> None:
        await self.deleter.delete(member, cause, reason)

    def begin_delete(self, member: Member, cause: Cause, reason: str) -> asyncio.Task[None]:
        return self.deleter.begin(member, cause, reason)

    def begin_pause(self, member: Member, by: PausedBy) -> asyncio.Task[None]:
        return self.pauser.begin(member, by)

    async def resume(self, member: Member) -> None:
        await self.pauser.resume(member)

    async def fork_unnamed(
        self, source: Member, count: int, checkpoint: str | None, memory: bool, drop_connections: bool
    ) -> list[Member]:
        requests = Request.for_forks(source.record, count, checkpoint, memory)
        return await self.forker.fork(source, requests, checkpoint, memory=memory, drop_connections=drop_connections)

    # --- the end --------------------------------------------------------------------------------------------------

    async def shut_down(self, *, keep: bool, timeout: float, drain: float) -> Shutdown:
        """Delete or keep all sandboxes, and close everything else."""
        context, report = self.context, Shutdown()
        context.closing = True
        await self._drain(drain)
        members = list(context.members)
        # Even with `keep`, delete spares and unfinished creations: nobody will claim or wait for them any more.
        leaving = [member for member in members if not keep or not member.available or member.creation]
        report.kept = [member.id for member in members if member not in leaving]
        tasks = {self.deleter.begin(each, Cause.USER, "the manager was shut down"): each.id for each in leaving}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        for task, id in tasks.items():
            if not task.done():
                report.failed[id] = f"not deleted within {timeout:g} s"
            elif task.cancelled() or task.exception() is not None:
                report.failed[id] = "cancelled" if task.cancelled() else str(task.exception())
            else:
                report.deleted.append(id)
        report.stuck = await self._close()
        await context.engines.aclose()
        return report

    async def _drain(self, seconds: float) -> None:
        creations = [member.creation.task for member in self.context.members if member.creation is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if creations:
                    await asyncio.wait(creations)
                for member in self.context.members:
                    await member.usage.quiet()

    async def _close(self) -> list[str]:
        """Close everything but the engines; sandboxes are left as they are. Returns the names of tasks that did not
        end."""
        self.context.closing = True
        stuck = await self.context.tasks.aclose(_CLOSE_S)
        for member in self.context.members:
            await member.sandbox.let_go()
        await self.context.journal.aclose()
        self._directory.close()
        return stuck
