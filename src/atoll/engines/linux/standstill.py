"""A sandbox that stands still only for a moment, while its memory is saved.

Who holds it still is noted beside its socket: if that process dies in the middle, whoever looks at the sandbox next
lets it go on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from atoll import durable
from atoll.engines.host.process_ref import ProcessRef, this_process
from atoll.engines.linux.launcher import Launcher
from atoll.engines.linux.layout import SandboxLayout
from atoll.waiting import Deadline

_HOLDER = "held"


class Standstill:
    def __init__(self, layout: SandboxLayout) -> None:
        self._layout = layout

    @asynccontextmanager
    async def holding(self, sandbox_id: str, launcher: Launcher, seconds: float) -> AsyncIterator[None]:
        """Still as long as the context lasts; then it goes on, unless it was paused before or is no more."""
        if launcher.is_paused(sandbox_id):
            yield
            return
        me = this_process()
        durable.write(self._holder(sandbox_id), f"{me.pid} {me.started}")
        try:
            await launcher.pause(sandbox_id, Deadline.after(seconds))
            yield
        finally:
            if self._layout.run(sandbox_id).exists():  # else it was ended meanwhile, on purpose
                await self.end(sandbox_id, launcher, Deadline.after(seconds))

    async def end(self, sandbox_id: str, launcher: Launcher, deadline: Deadline) -> None:
        await launcher.resume(sandbox_id, deadline)
        self._holder(sandbox_id).unlink(missing_ok=True)

    def is_held(self, sandbox_id: str) -> bool:
        return self._holder(sandbox_id).exists()

    def is_abandoned(self, sandbox_id: str) -> bool:
        """Held by a process that is gone."""
        try:
            words = self._holder(sandbox_id).read_text().split()
        except OSError:
            return False
        return not ProcessRef(int(words[0]), int(words[1])).is_alive()

    def _holder(self, sandbox_id: str) -> Path:
        return self._layout.run(sandbox_id) / _HOLDER
