"""Questions about a manager's sandboxes that change nothing."""

from __future__ import annotations

import abc
import asyncio
import datetime
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from atoll.engines.checkpointing import Checkpointing
from atoll.engines.contract import (
    ImageSource,
    LimitDefaults,
    OnImageProgress,
    OwnDefaultImage,
    checkpointing,
    having_volumes,
)
from atoll.engines.named_volumes import NamedVolumes
from atoll.errors import ImageError, ImageNotFoundError, SandboxError, SandboxNotFoundError, SandboxTimeoutError
from atoll.manager.context import ManagerContext
from atoll.manager.journal_tables import Search
from atoll.manager.members import Member
from atoll.manager.metrics import exposition, families
from atoll.manager.record import Event, Record
from atoll.manager.request import account_of
from atoll.manager.wiring import Wiring
from atoll.model import Limits, SandboxSpec, State, Stats

if TYPE_CHECKING:
    from prometheus_client import Metric

_LOOK_EVERY_S = 0.25
_MAX_ENDED = 1_000
_AT_ONCE = 32
_log = logging.getLogger(__name__)


class Queries(abc.ABC):
    """The part of `SandboxManager` that changes nothing."""

    _wiring: Wiring | None = None
    """None before the manager's first use."""

    @abc.abstractmethod
    async def _open(self) -> Wiring:
        """Return the parts of the manager. The first call creates and opens them."""

    async def _context(self) -> ManagerContext:
        return (await self._open()).context

    # --- sandboxes ------------------------------------------------------------------------------------------------

    async def list_sandboxes(
        self,
        *,
        state: State | None = None,
        owner: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        ended: bool = False,
    ) -> list[Record]:
        """Return matching sandboxes, newest first. With `ended`, return those that have ended, at most 1,000 of
        them."""
        context = await self._context()
        if ended:
            if state not in (None, State.MISSING):
                return []
            return await context.journal.ended(Search(owner, name, labels or {}, limit=_MAX_ENDED))
        records = [member.record for member in context.members if not member.waits_in_pool]
        found = [record for record in records if record.matches(state=state, owner=owner, name=name, labels=labels)]
        return sorted(found, key=lambda record: record.created_at, reverse=True)

    async def search_ended(
        self,
        *,
        owner: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        after: tuple[float, str] | None = None,
        limit: int = 100,
    ) -> list[Record]:
        """Return one page of sandboxes that have ended, newest first. `after` is the creation time and the id of the
        last sandbox on the previous page."""
        return await (await self._context()).journal.ended(Search(owner, name, labels or {}, after, limit))

    async def find_sandbox(self, name: str, *, owner: str | None = None) -> Record | None:
        """Return the owner's sandbox of this name, or of this task, or None if there is none."""
        member = (await self._context()).members.called(owner, name)
        return None if member is None else member.record

    async def recall(self, sandbox_id: str) -> Record | None:
        """Return the record of an existing sandbox without asking its engine, or None if there is no such sandbox."""
        member = (await self._context()).members.find(sandbox_id)
        return None if member is None or member.waits_in_pool else member.record

    async def describe(self, sandbox_id: str) -> Record:
        """Return the record of a sandbox after asking its engine, also of one that has ended. Raises
        SandboxNotFoundError."""
        wiring = await self._open()
        member = wiring.context.members.find(sandbox_id)
        if member is not None and not member.waits_in_pool:
            if member.free:
                await wiring.health.look(member)
            return member.record
        record = await wiring.context.journal.find(sandbox_id)
        if record is None or record.ended_at is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found")
        return record

    async def wait_until(self, sandbox_id: str, state: State, timeout: float = 60.0) -> Record:
        """Wait until the sandbox is in this state, where MISSING means ended. Raises SandboxTimeoutError after
        `timeout` seconds."""
        wiring = await self._open()
        member = wiring.context.members.find(sandbox_id)
        if member is None:
            record = await self.describe(sandbox_id)
            if record.state is state:
                return record
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found")
        try:
            async with asyncio.timeout(timeout):
                while member.record.state is not state or member.creation is not None:
                    # The manager reports its own changes; others are seen only by asking the engine.
                    if not await member.changes_within(_LOOK_EVERY_S) and member.free:
                        await wiring.health.look(member)
        except TimeoutError:
            raise SandboxTimeoutError(
                f"sandbox {sandbox_id} is {member.record.state}, not {state}, after {timeout:g} s"
            ) from None
        return member.record

    async def _member(self, sandbox_id: str) -> Member:
        """Return the member of this id. Raises SandboxNotFoundError, which says why the sandbox ended if it ever
        existed."""
        context = await self._context()
        try:
            return context.members.get(sandbox_id)
        except SandboxNotFoundError as error:
            try:
                record = await context.journal.find(sandbox_id)
            except SandboxError:
                raise error from None
            if record is not None and record.ended_at is not None:
                when = datetime.datetime.fromtimestamp(record.ended_at, datetime.UTC)
                error.hint = f"It ended at {when:%Y-%m-%d %H:%M:%S} UTC ({record.cause}): {record.reason}."
            raise

    async def _called(self, text: str, owner: str | None) -> Member:
        """Return the sandbox of this id, or the owner's sandbox of this name or task. Raises as `_member`."""
        members = (await self._context()).members
        found = members.find(text)
        if found is None or owner not in (None, found.record.owner):
            found = members.called(owner, text)
        if found is None and owner is not None:
            raise SandboxNotFoundError(f"Sandbox {text} not found")
        return await self._member(text if found is None else found.id)

    # --- events and figures ---------------------------------------------------------------------------------------

    async def events(
        self,
        *,
        after: int = 0,
        sandbox_id: str | None = None,
        owner: str | None = None,
        limit: int = 1000,
        kind: str | None = None,
    ) -> list[Event]:
        """Return events after this number, oldest first: of one sandbox, of one owner's sandboxes or of all; of one
        kind or of any."""
        journal = (await self._context()).journal
        return await journal.events(after=after, sandbox_id=sandbox_id, owner=owner, limit=limit, kind=kind)

    async def latest_event(self) -> int:
        """Return the number of the last event."""
        return await (await self._context()).journal.latest()

    async def resources(self) -> dict[str, Stats]:
        """Return the resources that each running sandbox uses."""
        context, slots = await self._context(), asyncio.Semaphore(_AT_ONCE)

        async def ask(member: Member) -> tuple[str, Stats]:
            async with slots:
                work = context.engine_of(member).stats(member.record.handle())
                try:
                    return member.id, await context.tasks.bounded(work, context.rules.inspect_s, "measure")
                except SandboxError:
                    return member.id, Stats()

        running = [member for member in context.members if member.usable and not member.waits_in_pool]
        return dict(await asyncio.gather(*(ask(member) for member in running)))

    def metrics(self) -> str:
        """Return figures about all sandboxes as text for Prometheus."""
        return exposition(self.metric_families()) if self._wiring is not None else ""

    def metric_families(self) -> list[Metric]:
        """Return the same figures as metric families of prometheus-client, for a registry of your own. May be called
        from any thread."""
        if self._wiring is None:
            return []
        context = self._wiring.context
        members = list(context.members)
        gauges = {
            "sandboxes_max": ("The most sandboxes that may exist.", context.rules.max_sandboxes),
            "active_operations": ("Operations in progress.", sum(member.usage.active for member in members)),
            "sandboxes_not_deleted": (
                "Sandboxes that could not be deleted so far.",
                sum(member.waits_for_deletion for member in members),
            ),
        }
        return list(families(_states(members), gauges, self._wiring.pools.figures(), context.metrics))

    def _figures(self) -> dict[str, object]:
        if self._wiring is None:
            return {"total_sandboxes": 0, "active_operations": 0}
        context = self._wiring.context
        return {
            "total_sandboxes": sum(1 for member in context.members if not member.waits_in_pool),
            "active_operations": sum(member.usage.active for member in context.members),
            "states": _states(context.members),
            "engine": context.engine.name,
            "pools": self._wiring.pools.figures(),
            "create_seconds": context.metrics.create_s.as_dict(),
            "exec_seconds": context.metrics.exec_s.as_dict(),
            "deaths": dict(context.metrics.deaths),
            "failures": dict(context.metrics.failures),
            "refusals": dict(context.metrics.refusals),
        }

    # --- engines --------------------------------------------------------------------------------------------------

    async def saved_states(self) -> Checkpointing:
        """Return the manager's engine if it can keep snapshots. Raises UnsupportedError otherwise."""
        return await checkpointing((await self._context()).engine)

    async def named_volumes(self) -> NamedVolumes:
        """Return the manager's engine if it has named volumes. Raises UnsupportedError otherwise."""
        return await having_volumes((await self._context()).engine)

    async def default_limits(self, spec: SandboxSpec, *, engine: str | None = None) -> Limits:
        """Return the limits that a sandbox of this spec gets where the spec names none. Raises SandboxError if its
        engine cannot say."""
        engines = (await self._context()).engines
        found = engines.get(engine or engines.name_for(spec))
        return (await found.default_limits(spec)).limits if isinstance(found, LimitDefaults) else Limits()

    async def account_of(self, owner: str) -> str:
        """Return the account that the sandboxes of this owner belong to."""
        return account_of(await self._context(), owner)

    async def changeable_limits(self, engine: str) -> frozenset[str]:
        """Return the limits of sandboxes of this engine that can be changed while they run."""
        return (await (await self._context()).engines.describe(engine)).changeable_limits

    async def default_image(self) -> str:
        """Return the image of a sandbox whose spec names none."""
        engine = (await self._context()).engine
        return engine.default_image if isinstance(engine, OwnDefaultImage) else "host"

    async def ensure_image(self, image: str, *, engine: str | None = None) -> bool:
        """Whether sandboxes can be created from this image. A missing image is pulled or built first."""
        try:
            await self.fetch_image(image, engine=engine)
        except ImageError as error:
            _log.warning("there is no image %r: %s", image, error)
            return False
        return True

    async def fetch_image(
        self, image: str, *, engine: str | None = None, on_progress: OnImageProgress | None = None
    ) -> None:
        """As `ensure_image`, but reports progress, and raises ImageError with the reason if the image is not
        available."""
        context = await self._context()
        source = context.engine if engine is None else context.engines.get(engine)
        if isinstance(source, ImageSource):
            await source.ensure_image(image, on_progress)
        elif image != "host":
            raise ImageNotFoundError(f"engine '{source.name}' cannot fetch images in advance")


def _states(members: Iterable[Member]) -> dict[str, int]:
    count = Counter(member.record.state for member in members if not member.waits_in_pool)
    return {state.value: count.get(state, 0) for state in State if state is not State.MISSING}
