"""Sandboxes that start from the memory of a ready sandbox of the same spec, and keeping that memory."""

from __future__ import annotations

import abc
import logging
import os

from atoll import agent_binary, workers
from atoll.cancellation import finish
from atoll.engines.linux.checkpoint_operations import CheckpointOperations
from atoll.engines.linux.launcher import Launcher
from atoll.engines.linux.linux_record import Base
from atoll.engines.linux.states.ready_states import ReadyStates, key_of
from atoll.engines.linux.states.saved_state import SavedState
from atoll.engines.linux.states.snapshots import SNAPSHOT
from atoll.errors import CheckpointNotFoundError, EngineError, ImageNotFoundError
from atoll.model import EffectiveLimits, Handle, SandboxSpec

_log = logging.getLogger(__name__)


class PrewarmOperations(CheckpointOperations):
    """Implements `Prewarming`."""

    _ready: ReadyStates

    @abc.abstractmethod
    def _defaults(self, spec: SandboxSpec) -> EffectiveLimits: ...

    @abc.abstractmethod
    async def _create(
        self, sandbox_id: str, spec: SandboxSpec, source: SavedState | None, ready_key: str = ""
    ) -> Handle: ...

    async def _create_prewarmed(self, sandbox_id: str, spec: SandboxSpec, launcher: Launcher) -> Handle:
        """Create a sandbox from the memory of a ready one. If there is none, or it cannot be restored, create the
        sandbox as others."""
        programs = await workers.run(workers.ENGINE, self._programs)
        key = key_of(spec, self._defaults(spec), launcher.name, *programs)
        base, origin = Base(image=spec.image), None
        if spec.image.startswith(SNAPSHOT):
            snapshot = await workers.run(workers.ENGINE, self._snapshots.named, spec.image)
            base, origin = snapshot.base, snapshot.id
        elif spec.image != "host":
            base = Base.of(await self.layout.images.ensure(spec.image), spec.image)
        saved = await workers.run(workers.ENGINE, self._ready.find, key, base, origin)
        if saved is not None:
            try:
                return await self._create(sandbox_id, spec, saved, key)
            except (EngineError, CheckpointNotFoundError, ImageNotFoundError) as error:
                _log.warning("a sandbox could not start from the memory of a ready one: %s", error)
                await finish(workers.run(workers.ENGINE, self._ready.drop, saved.id))
        return await self._create(sandbox_id, spec, None, key)

    def _programs(self) -> tuple[str, str]:
        """Return what differs between versions of the programs whose memory is saved, or that save it."""
        agent = os.stat(agent_binary.path())
        return self._memory_format.program_stamp(), f"{agent.st_size} {agent.st_mtime_ns}"

    async def keep_ready(self, handle: Handle) -> None:
        await self._observer.settle(handle.sandbox_id, memory=True)
        async with self.layout.exclusion.alone(handle.sandbox_id):
            record = self._observer.record(handle.sandbox_id, living=True)
            if not record.ready_key or record.prewarmed:
                return
            with self._ready.saving() as mine:
                if mine and not await workers.run(workers.ENGINE, self._ready.is_kept, record):
                    await finish(self._ready.save(record, await self._dumping(record)))

    async def distrust_ready(self, handle: Handle) -> None:
        record = self.layout.records.read(handle.sandbox_id)
        if record is not None and record.prewarmed and record.origin is not None:
            await finish(workers.run(workers.ENGINE, self._ready.drop, record.origin))
