"""What an engine of this kind does for builds: sandboxes' files become steps, and steps become images."""

from __future__ import annotations

from contextlib import AbstractContextManager

from atoll import workers
from atoll.archive.work import Work
from atoll.cancellation import finish
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.observation import Observer
from atoll.engines.linux.states.steps import Steps
from atoll.errors import UnsupportedError
from atoll.images import Image, ImageConfig, allowance
from atoll.model import Handle


class BuildOperations:
    """Implements `Building`."""

    layout: SandboxLayout
    _observer: Observer
    _steps: Steps

    async def save_step(self, handle: Handle, key: str) -> None:
        self._need_saving()
        async with self.layout.exclusion.alone(handle.sandbox_id):
            record = self._observer.record(handle.sandbox_id)
            await finish(workers.run(workers.ENGINE, self._steps.save, record, key))

    async def has_step(self, key: str) -> bool:
        return self.layout.layers.can_save and await workers.run(workers.ENGINE, self._steps.has, key)

    def step_view(self, key: str) -> AbstractContextManager[int]:
        return self._steps.view(key)

    async def commit_step(self, key: str, name: str, config: ImageConfig, *, owner: str = "") -> Image:
        self._need_saving()
        return await self.layout.images.work(lambda work: self._commit(key, name, config, owner, work))

    def _commit(self, key: str, name: str, config: ImageConfig, owner: str, work: Work) -> Image:
        store = self.layout.images.store
        before = store.find(name, owner)
        return allowance.current(store).keep_within(self._steps.commit(key, name, config, owner, work), before, work)

    async def prune_steps(self, keep_bytes: int | None = 0, *, unused_s: float = 0.0) -> int:
        if not self.layout.layers.can_save:
            return 0
        return await finish(workers.run(workers.ENGINE, self._steps.prune, keep_bytes, unused_s))

    def _need_saving(self) -> None:
        if not self.layout.layers.can_save:
            raise UnsupportedError(
                "images cannot be built here, because the state of a sandbox cannot be saved",
                hint="Run this as root, with btrfs-progs installed (apt-get install btrfs-progs).",
            )
