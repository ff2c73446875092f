"""What a manager does first: bring together what was written down and what the engine has.

| written down            | the engine has it                   | it has not                          |
|-------------------------|-------------------------------------|-------------------------------------|
| being created           | deleted: nobody was told of it      | ended: it was never ready           |
| being deleted           | deleted                             | ended, with the cause written down  |
| waiting in a pool       | back to its pool, if it lives       | ended: lost                         |
| anything else           | adopted as the engine sees it       | ended: lost, or the machine restarted |
| it has ended            | deleted: it has outlived its end    |                                     |
| nothing, with our mark  | adopted: never deleted on doubt     |                                     |
| nothing, without it     | left alone: it is somebody else's   |                                     |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.engines import registry
from atoll.errors import EngineNotFoundError, SandboxError
from atoll.manager.core import Core
from atoll.manager.members import Member
from atoll.manager.orphans import has_ended, is_marked
from atoll.manager.pools import Pools
from atoll.manager.record import Act, Record
from atoll.manager.request import LIFETIME, expiry
from atoll.model import Cause, Handle, SandboxSpec, State
from atoll.sandbox import MOST_LEASE_S

_AT_ONCE = 32
_LIST_S = 60.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovered:
    """What was found at the start."""

    adopted: list[str] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    """Half-made creations."""
    deleted: list[str] = field(default_factory=list)
    """Half-made deletions."""
    lost: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """The engine could not do its part; tried again later."""
    journal_put_aside: str | None = None


class Recovery:
    def __init__(self, core: Core, pools: Pools) -> None:
        self._core = core
        self._pools = pools
        self._report = Recovered()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._silent: set[str] = set()
        """Engines that do not answer."""

    async def run(self) -> Recovered:
        """Raises what the engine says if it cannot even list what it has."""
        core = self._core
        if core.journal.rebuilt is not None:
            self._report.journal_put_aside = str(core.journal.rebuilt)
            _log.error("the journal was damaged and put aside as '%s'", core.journal.rebuilt)
        records, damaged = await core.journal.living()
        handles = await self._list_all({record.engine for record in records})
        known = {record.id for record in records}
        strangers = []
        for id, handle in handles.items():
            if id in known or not (id in damaged or is_marked(core, handle)):
                continue
            if id not in damaged and await has_ended(core, handle):
                self._report.deleted.append(id)  # by `Orphans`, which comes next
            else:
                strangers.append(self._from_engine(handle))
        for record in (
            *self._of_known_engines(records),
            *strangers,
        ):  # all at once, so that every limit counts all of them from the start
            core.members.add(core.member(self._without_doubles(record)))
        await asyncio.gather(*(self._settle(member, handles.get(member.id)) for member in core.members))
        return self._report

    def _of_known_engines(self, records: list[Record]) -> Iterator[Record]:
        for record in records:
            try:
                self._core.engines.get(record.engine)
            except EngineNotFoundError as error:
                _log.warning("sandbox %s is left alone: %s", record.id, error)
            else:
                yield record

    async def _list_all(self, names: set[str]) -> dict[str, Handle]:
        """What the engines have that the journal speaks of; if it is new, what any engine has."""
        core = self._core
        names -= {core.engine.name}
        if core.journal.is_new:
            names |= set(registry.names()) - {core.engine.name}
        found = {}
        for handle in await core.tasks.bounded(core.engine.list(), _LIST_S, "list sandboxes"):
            found[handle.sandbox_id] = handle
        for name in sorted(names):
            try:
                listed = await core.tasks.bounded(core.engines.get(name).list(), _LIST_S, f"list sandboxes of {name}")
            except SandboxError as error:
                # That an engine is away of which nobody has asked for anything is no news.
                level = logging.DEBUG if name in registry.names() and core.journal.is_new else logging.WARNING
                _log.log(level, "engine '%s' cannot say what it has: %s", name, error)
                self._silent.add(name)
            else:
                # Of two engines that share a place, one may name a broken sandbox that is the other's.
                found.update({handle.sandbox_id: handle for handle in listed if handle.sandbox_id not in found})
        return found

    async def _settle(self, member: Member, handle: Handle | None) -> None:
        async with self._slots:
            try:
                await self._decide(member, handle)
            except SandboxError as error:
                _log.warning("sandbox %s could not be settled: %s", member.id, error)
                self._report.failed.append(member.id)

    async def _decide(self, member: Member, handle: Handle | None) -> None:
        core, record = self._core, member.record
        if record.act is Act.CREATE:
            self._report.undone.append(member.id)
            await core.ending.delete(member, Cause.LOST, "the manager died while it was being made")
        elif record.act is Act.DELETE:
            self._report.deleted.append(member.id)
            await core.ending.delete(member, record.cause or Cause.USER, record.reason)
        elif record.engine in self._silent:
            self._report.failed.append(member.id)
            await core.health.look(member)
        elif handle is None:
            self._report.lost.append(member.id)
            cause, reason = self._why_gone(record)
            core.metrics.deaths[cause] += 1
            await core.ledger.end(member, cause, reason)
        else:
            await self._adopt(member, handle)

    async def _adopt(self, member: Member, handle: Handle) -> None:
        core = self._core
        member.sandbox.adopt(handle)
        found = {"details": handle.details, "spec": _with_network_of(member.record.spec, handle.spec)}
        await core.ledger.change(member, update={**found, **self._time_left(member.record)})
        await core.health.look(member)
        if member.record.state is State.RUNNING and member.record.paused_by is not None:
            await core.ledger.correct(member, {"paused_by": None})
        self._report.adopted.append(member.id)
        if member.waits_in_pool:
            self._pools.put_back(member)

    def _why_gone(self, record: Record) -> tuple[Cause, str]:
        if record.boot_id != self._core.clock.boot_id:
            return Cause.HOST, "the machine was restarted"
        return Cause.LOST, "the engine does not have it any more"

    def _time_left(self, record: Record) -> dict[str, object]:
        """Times of another boot mean nothing on this one's clock; the wall's is then the best there is."""
        clock = self._core.clock
        if record.boot_id == clock.boot_id:
            return {}
        times: dict[str, object] = {"boot_id": clock.boot_id}
        if record.leased_until is not None:
            times["leased_now"] = clock.now() + max(0.0, min(record.leased_until - clock.wall(), MOST_LEASE_S))
        if record.expires_at is None or record.lifetime_s is None:
            return times
        left = max(0.0, min(record.expires_at - clock.wall(), record.lifetime_s))
        return {**times, **expiry(self._core, left), "lifetime_s": record.lifetime_s}

    def _from_engine(self, handle: Handle) -> Record:
        labels, most = handle.spec.labels, self._core.rules.max_lifetime
        lifetime = float(labels[LIFETIME]) if LIFETIME in labels else None
        lifetime = lifetime if most is None else min(lifetime or most, most)
        record = Record(
            id=handle.sandbox_id,
            engine=handle.engine,
            spec=handle.spec,
            state=State.RUNNING,
            reason="found without a record",
            name=labels.get("atoll.name"),
            owner=labels.get("atoll.owner"),
            labels={label: value for label, value in labels.items() if not label.startswith("atoll.")},
            created_at=handle.created_at,
        )
        return record.model_copy(update=expiry(self._core, lifetime))

    def _without_doubles(self, record: Record) -> Record:
        """A rebuilt journal may give a name to two: the later one then has none."""
        taken = record.name is not None and self._core.members.named(record.owner, record.name) is not None
        return record.model_copy(update={"name": None}) if taken else record


def _with_network_of(written: SandboxSpec, seen: SandboxSpec) -> SandboxSpec:
    """The engine changes a policy before we can write it down."""
    return written if written.network == seen.network else written.model_copy(update={"network": seen.network})
