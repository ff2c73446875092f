"""What a manager can tell about its sandboxes."""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections import Counter
from collections.abc import Mapping

from atoll.engines.base import ImageSource, OnImageProgress, OwnDefaultImage
from atoll.errors import ImageError, ImageNotFoundError, SandboxError, SandboxNotFoundError, SandboxTimeoutError
from atoll.manager.core import Core
from atoll.manager.journal_tables import Search
from atoll.manager.members import Member
from atoll.manager.metrics import exposition
from atoll.manager.pools import Pools
from atoll.manager.record import Record
from atoll.model import State, Stats

_LOOK_EVERY_S = 0.25
_log = logging.getLogger(__name__)
_ENDED = 1_000
_AT_ONCE = 32


class Queries:
    def __init__(self, core: Core, pools: Pools) -> None:
        self._core = core
        self._pools = pools

    async def list(
        self,
        *,
        state: State | None,
        owner: str | None,
        name: str | None,
        labels: Mapping[str, str] | None,
        ended: bool,
    ) -> list[Record]:
        if ended:
            if state not in (None, State.MISSING):
                return []
            return await self._core.journal.ended(Search(owner, name, labels or {}, limit=_ENDED))
        records = [member.record for member in self._core.members if not member.waits_in_pool]
        found = [record for record in records if record.matches(state=state, owner=owner, name=name, labels=labels)]
        return sorted(found, key=lambda record: record.created_at, reverse=True)

    async def describe(self, sandbox_id: str) -> Record:
        member = self._core.members.find(sandbox_id)
        if member is not None and not member.waits_in_pool:
            if member.free:
                await self._core.health.look(member)
            return member.record
        record = await self._core.journal.find(sandbox_id)
        if record is None or record.ended_at is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found")
        return record

    async def explain(self, sandbox_id: str, error: SandboxNotFoundError) -> None:
        """Add to the error what became of the sandbox, if it ever was."""
        try:
            record = await self._core.journal.find(sandbox_id)
        except SandboxError:
            return
        if record is not None and record.ended_at is not None:
            when = datetime.datetime.fromtimestamp(record.ended_at, datetime.UTC)
            error.hint = f"It ended at {when:%Y-%m-%d %H:%M:%S} UTC ({record.cause}): {record.reason}."

    async def wait_until(self, sandbox_id: str, state: State, timeout: float) -> Record:
        member = self._core.members.find(sandbox_id)
        if member is None:
            record = await self.describe(sandbox_id)
            if record.state is state:
                return record
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found")
        try:
            async with asyncio.timeout(timeout):
                while member.record.state is not state or member.making is not None:
                    await self._next_change(member)
        except TimeoutError:
            raise SandboxTimeoutError(
                f"sandbox {sandbox_id} is {member.record.state}, not {state}, after {timeout:g} s"
            ) from None
        return member.record

    async def _next_change(self, member: Member) -> None:
        """Of ours, or one that only the engine sees."""
        try:
            async with asyncio.timeout(_LOOK_EVERY_S):
                await member.changed()
        except TimeoutError:
            if member.free:
                await self._core.health.look(member)

    async def resources(self) -> dict[str, Stats]:
        slots = asyncio.Semaphore(_AT_ONCE)

        async def ask(member: Member) -> tuple[str, Stats]:
            async with slots:
                work = self._core.engine_of(member).stats(member.record.handle())
                try:
                    return member.id, await self._core.tasks.bounded(work, self._core.rules.inspect_s, "measure")
                except SandboxError:
                    return member.id, Stats()

        running = [member for member in self._core.members if member.usable and not member.waits_in_pool]
        return dict(await asyncio.gather(*(ask(member) for member in running)))

    async def ensure_image(self, image: str, engine_name: str | None) -> bool:
        try:
            await self.fetch_image(image, engine_name, None)
        except ImageError as error:
            _log.warning("there is no image %r: %s", image, error)
            return False
        return True

    async def fetch_image(self, image: str, engine_name: str | None, on_progress: OnImageProgress | None) -> None:
        engine = self._core.engine if engine_name is None else self._core.engines.get(engine_name)
        if isinstance(engine, ImageSource):
            await engine.ensure_image(image, on_progress)
        elif image != "host":
            raise ImageNotFoundError(f"engine '{engine.name}' gets its images when a sandbox needs them")

    def default_image(self) -> str:
        engine = self._core.engine
        return engine.default_image if isinstance(engine, OwnDefaultImage) else "host"

    def figures(self) -> dict[str, object]:
        core = self._core
        return {
            "total_sandboxes": sum(1 for member in core.members if not member.waits_in_pool),
            "active_operations": self._active(),
            "states": self._states(),
            "engine": core.engine.name,
            "pools": self._pools.figures(),
            "create_seconds": core.metrics.create_s.as_dict(),
            "exec_seconds": core.metrics.exec_s.as_dict(),
            "deaths": dict(core.metrics.deaths),
            "failures": dict(core.metrics.failures),
            "refusals": dict(core.metrics.refusals),
        }

    def exposition(self) -> str:
        core = self._core
        gauges = {
            "sandboxes_max": core.rules.max_sandboxes,
            "active_operations": self._active(),
            "sandboxes_not_deleted": sum(member.waits_for_deletion for member in core.members),
        }
        return exposition(self._states(), gauges, self._pools.figures(), core.metrics)

    def _active(self) -> int:
        return sum(member.usage.active for member in self._core.members)

    def _states(self) -> dict[str, int]:
        count = Counter(member.record.state for member in self._core.members if not member.waits_in_pool)
        return {state.value: count.get(state, 0) for state in State if state is not State.MISSING}
