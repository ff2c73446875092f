"""Removes what nobody owns any more, at the start of a manager and regularly.

There are two kinds. What calls that were killed in the middle left behind is known to the engine. A sandbox of ours
that has ended for us and still exists (because somebody else started it again, or the engine was wrong) is found by
comparing what the engine has with what is written down. What is not written down at all is never deleted: the next
start adopts it.
"""

from __future__ import annotations

import asyncio
import logging

from atoll.engines.base import Collecting, Engine
from atoll.errors import SandboxError
from atoll.manager.core import MARK, Core
from atoll.model import Handle

_LONGEST_PAUSE_S = 300.0
_COLLECT_S = 60.0
_MOST_AT_ONCE = 32
_log = logging.getLogger(__name__)


class Orphans:
    def __init__(self, core: Core) -> None:
        self._core = core

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self.collect()
            await asyncio.sleep(min(_LONGEST_PAUSE_S, self._core.rules.cleanup_interval))

    async def collect(self) -> list[str]:
        """What was removed. Bounded: what is left is for the next time."""
        removed: list[str] = []
        for engine in self._core.engines:
            if engine.name not in self._core.engines.used:
                continue
            try:
                removed += await self._collect(engine)
            except (SandboxError, OSError) as error:
                self._core.metrics.failures["cleanup"] += 1
                _log.warning("engine '%s' cannot remove leftovers: %s", engine.name, error)
        for each in removed:
            _log.info("removed %s, which nobody owned", each)
        return removed

    async def _collect(self, engine: Engine) -> list[str]:
        core = self._core
        removed: list[str] = []
        if isinstance(engine, Collecting):
            removed += await core.tasks.bounded(engine.gc(shared=False), _COLLECT_S, "collect what nobody owns")
        listed = await core.tasks.bounded(engine.list(), _COLLECT_S, f"list sandboxes of {engine.name}")
        for handle in [each for each in listed if self._may_be_orphaned(each)][:_MOST_AT_ONCE]:
            if await has_ended(core, handle):
                await core.tasks.bounded(engine.delete(handle), core.rules.delete_s, f"delete {handle.sandbox_id}")
                removed.append(f"sandbox {handle.sandbox_id}")
        return removed

    def _may_be_orphaned(self, handle: Handle) -> bool:
        """One that is ours is a member from before it is made until it is gone."""
        return is_marked(self._core, handle) and self._core.members.find(handle.sandbox_id) is None


def is_marked(core: Core, handle: Handle) -> bool:
    return handle.spec.labels.get(MARK) == core.mark


async def has_ended(core: Core, handle: Handle) -> bool:
    """Whether it is written down that this sandbox was deleted, or was never finished."""
    record = await core.journal.find(handle.sandbox_id)
    if record is not None:
        return record.ended_at is not None
    return bool(await core.journal.events(after=0, sandbox_id=handle.sandbox_id, limit=1))
