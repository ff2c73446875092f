"""Stopping a sandbox for a moment, while its memory is saved.

A note beside the sandbox's socket names the process that stops it. If that process dies in the middle, the next process
that looks at the sandbox resumes it.
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
        """Stop the sandbox while the context lasts. It then runs again, unless it was paused before or has ended."""
        if launcher.is_paused(sandbox_id):
            yield
            return
        me = this_process()
        durable.write(self._holder(sandbox_id), f"{me.pid} {me.started}")
        try:
            await launcher.pause(sandbox_id, Deadline.after(seconds))
            yield
        finally:
            if self._layout.run(sandbox_id).exists():  # otherwise it was ended on purpose meanwhile
                await self.end(sandbox_id, launcher, Deadline.after(seconds))

    async def end(self, sandbox_id: str, launcher: Launcher, deadline: Deadline) -> None:
        await launcher.resume(sandbox_id, deadline)
        self._holder(sandbox_id).unlink(missing_ok=True)

    def is_held(self, sandbox_id: str) -> bool:
        return self._holder(sandbox_id).exists()

    def is_abandoned(self, sandbox_id: str) -> bool:
        """Whether the process that holds the sandbox is dead."""
        try:
            words = self._holder(sandbox_id).read_text().split()
        except OSError:
            return False
        return not ProcessRef(int(words[0]), int(words[1])).is_alive()

    def _holder(self, sandbox_id: str) -> Path:
        return self._layout.run(sandbox_id) / _HOLDER
