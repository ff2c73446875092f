"""Reconcile the journal with the sandboxes that the engines have, first of all at the start of a manager.

| journal                 | the engine has the sandbox          | the engine does not have it         |
|-------------------------|-------------------------------------|-------------------------------------|
| being created           | deleted: no caller knows of it      | ended: it was never ready           |
| being deleted           | deleted                             | ended, with the recorded cause      |
| waiting in a pool       | back to its pool, if it lives       | ended: lost                         |
| anything else           | adopted as the engine sees it       | ended: lost, or the machine restarted |
| has ended               | deleted: it has outlived its end    |                                     |
| no entry, our label     | adopted: never deleted on doubt     |                                     |
| no entry, no such label | left alone: it is somebody else's   |                                     |

Later, `OrphanCollector` periodically removes what nobody owns any more. There are three kinds. The engine itself knows
what was left behind by calls that were killed halfway. A sandbox of this manager that has ended according to the
journal but still exists (because somebody started it again, or the engine was wrong) is found by comparison. A sandbox
that is not in the journal at all is never deleted: the next start adopts it. A sandbox of a build says which process
builds; it is removed when that process has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.engines import registry
from atoll.engines.contract import Engine, GarbageCollecting
from atoll.errors import EngineNotFoundError, SandboxError
from atoll.manager.context import ManagerContext
from atoll.manager.health import Health
from atoll.manager.members import Member
from atoll.manager.operations.delete import Deleter
from atoll.manager.pool import Pools
from atoll.manager.record import Operation, Record
from atoll.manager.request import LIFETIME_LABEL
from atoll.manager.supervisor import MemberFactory
from atoll.model import MANAGER_LABEL, NAME_LABEL, Cause, Handle, SandboxSpec, State
from atoll.model.spec import OWNER_LABEL
from atoll.sandbox.sandbox import MAX_LEASE_S

_AT_ONCE = 32
_LIST_S = 60.0
_COLLECT_S = 60.0
_MAX_PAUSE_S = 300.0
_MAX_REMOVALS = 32
"""How many sandboxes are removed at a time."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Recovered:
    """What a manager found when it started. The lists contain ids of sandboxes."""

    adopted: list[str] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    """Sandboxes whose creation had not been finished."""
    deleted: list[str] = field(default_factory=list)
    """Sandboxes whose deletion had not been finished."""
    lost: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Sandboxes for which the engine failed. They are tried again later."""
    journal_put_aside: str | None = None


class Recovery:
    """Recovers what an earlier manager left. This is the first thing that a manager does."""

    def __init__(
        self, context: ManagerContext, factory: MemberFactory, health: Health, deleter: Deleter, pools: Pools
    ) -> None:
        self._context = context
        self._factory = factory
        self._health = health
        self._deleter = deleter
        self._pools = pools
        self._report = Recovered()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._silent: set[str] = set()
        """Engines that do not answer."""

    async def run(self) -> Recovered:
        """Recover everything. Raises the engine's error if the manager's own engine cannot even list its sandboxes."""
        context = self._context
        if context.journal.rebuilt is not None:
            self._report.journal_put_aside = str(context.journal.rebuilt)
            _log.error("the journal was damaged and put aside as '%s'", context.journal.rebuilt)
        records, damaged = await context.journal.living()
        handles = await self._list_all({record.engine for record in records})
        known = {record.id for record in records}
        strangers = []
        for id, handle in handles.items():
            if id in known or not (id in damaged or _is_ours(context, handle)):
                continue
            if id not in damaged and await _has_ended(context, handle):
                self._report.deleted.append(id)  # the `OrphanCollector`, which runs next, deletes it
            else:
                strangers.append(self._from_engine(handle))
        # Add all members first, so that every limit counts all of them from the start.
        for record in (*self._of_known_engines(records), *strangers):
            context.members.add(self._factory.new(self._without_doubles(record)))
        await asyncio.gather(*(self._settle(member, handles.get(member.id)) for member in context.members))
        return self._report

    def _of_known_engines(self, records: list[Record]) -> Iterator[Record]:
        for record in records:
            try:
                self._context.engines.get(record.engine)
            except EngineNotFoundError as error:
                _log.warning("sandbox %s is left alone: %s", record.id, error, extra={"sandbox_id": record.id})
            else:
                yield record

    async def _list_all(self, names: set[str]) -> dict[str, Handle]:
        """List the sandboxes of the engines that the journal mentions, or of every engine if the journal is new."""
        context = self._context
        names -= {context.engine.name}
        if context.journal.is_new:
            names |= set(registry.names()) - {context.engine.name}
        found = {}
        for handle in await context.tasks.bounded(context.engine.list(), _LIST_S, "list sandboxes"):
            found[handle.sandbox_id] = handle
        await context.tasks.bounded(context.engines.describe(context.engine.name), _LIST_S, "describe the engine")
        for name in sorted(names):
            try:
                listed = await context.tasks.bounded(
                    context.engines.get(name).list(), _LIST_S, f"list sandboxes of {name}"
                )
                if listed:
                    await context.tasks.bounded(context.engines.describe(name), _LIST_S, f"describe engine {name}")
            except SandboxError as error:
                # An engine that is unavailable, and that nobody asked for, is no reason for a warning.
                level = logging.DEBUG if name in registry.names() and context.journal.is_new else logging.WARNING
                _log.log(level, "engine '%s' cannot say what it has: %s", name, error)
                self._silent.add(name)
            else:
                # Of two engines that share a directory, one may list a broken sandbox that belongs to the other.
                found.update({handle.sandbox_id: handle for handle in listed if handle.sandbox_id not in found})
        return found

    async def _settle(self, member: Member, handle: Handle | None) -> None:
        async with self._slots:
            try:
                await self._decide(member, handle)
            except SandboxError as error:
                _log.warning("sandbox %s could not be recovered: %s", member.id, error, extra={"sandbox_id": member.id})
                self._report.failed.append(member.id)

    async def _decide(self, member: Member, handle: Handle | None) -> None:
        context, record = self._context, member.record
        if record.act is Operation.CREATE:
            self._report.undone.append(member.id)
            await self._deleter.delete(member, Cause.LOST, "the manager died while it was being made")
        elif record.act is Operation.DELETE:
            self._report.deleted.append(member.id)
            await self._deleter.delete(member, record.cause or Cause.USER, record.reason)
        elif record.engine in self._silent:
            self._report.failed.append(member.id)
            await self._health.look(member)
        elif handle is None:
            self._report.lost.append(member.id)
            cause, reason = self._why_gone(record)
            context.metrics.deaths[cause] += 1
            await context.transitions.end(member, cause, reason)
        else:
            await self._adopt(member, handle)

    async def _adopt(self, member: Member, handle: Handle) -> None:
        context = self._context
        member.sandbox.adopt(handle)
        found = {"details": handle.details, "spec": _with_changes_of(member.record.spec, handle.spec)}
        await context.transitions.change(member, update={**found, **self._time_left(member.record)})
        await self._health.look(member)
        if member.record.state is State.RUNNING and member.record.paused_by is not None:
            await context.transitions.correct(member, {"paused_by": None})
        self._report.adopted.append(member.id)
        if member.record.state is State.RUNNING:
            context.tasks.spawn(_complete_start(member), f"complete the start of {member.id}")
        if member.waits_in_pool:
            self._pools.put_back(member)

    def _why_gone(self, record: Record) -> tuple[Cause, str]:
        if record.boot_id != self._context.clock.boot_id:
            return Cause.HOST, "the machine was restarted"
        return Cause.LOST, "the engine does not have it any more"

    def _time_left(self, record: Record) -> dict[str, object]:
        """Return record fields with the remaining times on the clock of this boot.

        Boot-time clock values of another boot mean nothing now. The wall clock is then the best source.
        """
        clock = self._context.clock
        if record.boot_id == clock.boot_id:
            return {}
        times: dict[str, object] = {"boot_id": clock.boot_id}
        if record.leased_until is not None:
            times["leased_now"] = clock.now() + max(0.0, min(record.leased_until - clock.wall(), MAX_LEASE_S))
        if record.expires_at is None or record.lifetime_s is None:
            return times
        left = max(0.0, min(record.expires_at - clock.wall(), record.lifetime_s))
        return {**times, **self._context.expiry(left), "lifetime_s": record.lifetime_s}

    def _from_engine(self, handle: Handle) -> Record:
        labels = handle.spec.labels
        lifetime = float(labels[LIFETIME_LABEL]) if LIFETIME_LABEL in labels else None
        record = Record(
            id=handle.sandbox_id,
            engine=handle.engine,
            spec=handle.spec,
            state=State.RUNNING,
            reason="found without a record",
            name=labels.get(NAME_LABEL),
            owner=labels.get(OWNER_LABEL),
            labels={label: value for label, value in labels.items() if not label.startswith("atoll.")},
            created_at=handle.created_at,
        )
        return record.model_copy(update=self._context.expiry(self._context.shortened(lifetime)))

    def _without_doubles(self, record: Record) -> Record:
        """Return the record without its name if that is taken. After a rebuilt journal two sandboxes may have one name;
        the later one loses it."""
        taken = record.name is not None and self._context.members.named(record.owner, record.name) is not None
        return record.model_copy(update={"name": None}) if taken else record


def _with_changes_of(written: SandboxSpec, seen: SandboxSpec) -> SandboxSpec:
    """Return the recorded spec with the engine's network policy and limits, because the engine changes these before
    they are recorded."""
    settled = written.settled(seen)
    if (written.network, written.limits) == (seen.network, seen.limits):
        return settled
    return settled.model_copy(update={"network": seen.network, "limits": seen.limits})


async def _complete_start(member: Member) -> None:
    try:
        await member.sandbox.complete_start()
    except (SandboxError, OSError) as error:
        said = "what sandbox %s starts cannot be started again: %s"
        _log.warning(said, member.id, error, extra={"sandbox_id": member.id})


class OrphanCollector:
    """Removes sandboxes and other remains that nobody owns any more."""

    def __init__(self, context: ManagerContext) -> None:
        self._context = context

    async def run(self) -> None:
        """Collect periodically. Never returns."""
        while True:
            await self.collect()
            await asyncio.sleep(min(_MAX_PAUSE_S, self._context.rules.cleanup_interval))

    async def collect(self) -> list[str]:
        """Remove orphans and return descriptions of them. The number is bounded; the next call continues."""
        removed: list[str] = []
        for engine in self._context.engines:
            if engine.name not in self._context.engines.used:
                continue
            try:
                removed += await self._collect(engine)
            except (SandboxError, OSError) as error:
                self._context.metrics.failures["cleanup"] += 1
                _log.warning("engine '%s' cannot remove leftovers: %s", engine.name, error)
        for each in removed:
            _log.info("removed %s, which nobody owned", each)
        return removed

    async def _collect(self, engine: Engine) -> list[str]:
        from atoll.builds.labels import is_left_by_a_build  # slow to import, and not needed for the start

        context = self._context
        removed: list[str] = []
        if isinstance(engine, GarbageCollecting):
            removed += await context.tasks.bounded(engine.gc(shared=False), _COLLECT_S, "collect what nobody owns")
        listed = await context.tasks.bounded(engine.list(), _COLLECT_S, f"list sandboxes of {engine.name}")
        for handle in [each for each in listed if self._may_be_orphaned(each)][:_MAX_REMOVALS]:
            if await _has_ended(context, handle):
                await context.tasks.bounded(
                    engine.delete(handle), context.rules.delete_s, f"delete {handle.sandbox_id}"
                )
                removed.append(f"sandbox {handle.sandbox_id}")
        for handle in [each for each in listed if is_left_by_a_build(each)][:_MAX_REMOVALS]:
            await context.tasks.bounded(engine.delete(handle), context.rules.delete_s, f"delete {handle.sandbox_id}")
            removed.append(f"sandbox {handle.sandbox_id} of a build")
        return removed

    def _may_be_orphaned(self, handle: Handle) -> bool:
        """Whether this is a sandbox of this manager that is no member. A sandbox is a member from before its creation
        until it is gone."""
        return _is_ours(self._context, handle) and self._context.members.find(handle.sandbox_id) is None


def _is_ours(context: ManagerContext, handle: Handle) -> bool:
    return handle.spec.labels.get(MANAGER_LABEL) == context.manager_id


async def _has_ended(context: ManagerContext, handle: Handle) -> bool:
    """Whether the journal says that this sandbox was deleted, or that its creation was not finished."""
    record = await context.journal.find(handle.sandbox_id)
    if record is not None:
        return record.ended_at is not None
    return bool(await context.journal.events(after=0, sandbox_id=handle.sandbox_id, limit=1))
