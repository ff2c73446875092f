"""All pools of a manager."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.errors import SpecError
from atoll.manager.core import Core
from atoll.manager.members import Member
from atoll.manager.pool import MakeSpare, Pool, PoolSettings
from atoll.manager.record import Event
from atoll.manager.request import Request
from atoll.model import Cause, State


class Pools:
    make_spare: MakeSpare

    def __init__(self, core: Core, settings: Iterable[PoolSettings]) -> None:
        self._core = core
        self._pools: dict[str, Pool] = {}
        for pool in settings:
            self.add(pool)
        core.ledger.listeners.append(self._on_event)

    def add(self, settings: PoolSettings) -> Pool:
        if settings.key in self._pools:
            raise SpecError("there is already a pool of this spec")
        pool = self._pools[settings.key] = Pool(self._core, settings, lambda request: self.make_spare(request))
        return pool

    def start(self) -> None:
        for pool in self._pools.values():
            pool.start()

    async def take(self, request: Request) -> Member | None:
        """A spare for this request; it must be used or put back. None: there is none, or no pool is for it."""
        fitting = [pool for pool in self._pools.values() if pool.fits(request)]
        for pool in fitting:
            member = await pool.take()
            if member is not None:
                pool.count(hit=True)
                return member
        for pool in fitting[:1]:
            pool.count(hit=False)
        return None

    def put_back(self, member: Member) -> None:
        """Also one that is found again after a restart. Without its pool it is not needed any more."""
        pool = self._pools.get(member.record.pool or "")
        if pool is not None:
            pool.put_back(member)
        elif member.waits_in_pool and not member.doomed:
            self._core.ending.begin(member, Cause.POLICY, "its pool is gone")

    def wake(self) -> None:
        """There may be room now."""
        for pool in self._pools.values():
            pool.wake()

    def tidy(self) -> None:
        for pool in self._pools.values():
            pool.tidy()

    def figures(self) -> dict[str, dict[str, int | float]]:
        return {key: pool.figures() for key, pool in self._pools.items()}

    def _on_event(self, event: Event) -> None:
        if event.after is State.MISSING:
            self.wake()
