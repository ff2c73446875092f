"""Standing still and going on: with the freezer of the control group, or by a runtime whose kernel can stop itself.

A virtual kernel that is frozen from outside answers nobody, its own tools included; one that was told to pause still
does. What it was told is noted beside its socket, because asking it takes the start of a program.

To save its memory a sandbox is held still for a moment. Who does that is noted too: if that process dies in the middle,
whoever looks at the sandbox next lets it go on.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from atoll.engines.linux.oci import runtimes, start
from atoll.engines.linux.oci.places import Places
from atoll.engines.linux.oci.runtimes import Runtime
from atoll.engines.local.processes import ProcessRef
from atoll.engines.local.waiting import Deadline
from atoll.errors import EngineError

_NOTE, _HOLDER = "paused", "held"


class Pausing:
    def __init__(self, places: Places) -> None:
        self._places = places

    async def pause(self, sandbox_id: str, runtime: Runtime, deadline: Deadline) -> None:
        """When it returns, nothing inside runs. Raises EngineError, and then it goes on. Safe to repeat."""
        if not runtime.virtual_kernel:
            await self._places.group(sandbox_id).freeze(deadline)
        elif not self._note(sandbox_id).exists():
            # Noted first: if we die in between, a needless resume does no harm, a missing one would.
            self._note(sandbox_id).touch()
            try:
                await self._tell(sandbox_id, runtime, "pause", deadline=deadline)
            except BaseException:
                self._note(sandbox_id).unlink(missing_ok=True)
                raise

    async def resume(self, sandbox_id: str, runtime: Runtime, deadline: Deadline) -> None:
        if not runtime.virtual_kernel:
            self._places.group(sandbox_id).thaw()
        elif self._note(sandbox_id).exists():
            await self._tell(sandbox_id, runtime, "resume", deadline=deadline)
            self._note(sandbox_id).unlink(missing_ok=True)

    @asynccontextmanager
    async def holding(self, sandbox_id: str, runtime: Runtime, seconds: float) -> AsyncIterator[None]:
        """Still as long as the context lasts; then it goes on, unless it was paused before or is no more."""
        if self.is_paused(sandbox_id):
            yield
            return
        me = ProcessRef.of(os.getpid())
        assert me is not None
        draft = self._holder(sandbox_id).with_suffix(".draft")
        draft.write_text(f"{me.pid} {me.started}")
        draft.rename(self._holder(sandbox_id))
        try:
            await self.pause(sandbox_id, runtime, Deadline.after(seconds))
            yield
        finally:
            if self._places.run(sandbox_id).exists():  # else it was ended meanwhile, on purpose
                await self.let_go(sandbox_id, runtime, Deadline.after(seconds))

    async def let_go(self, sandbox_id: str, runtime: Runtime, deadline: Deadline) -> None:
        """The end of `holding`."""
        await self.resume(sandbox_id, runtime, deadline)
        self._holder(sandbox_id).unlink(missing_ok=True)

    def is_held(self, sandbox_id: str) -> bool:
        """It stands still only for a moment, by itself."""
        return self._holder(sandbox_id).exists()

    def is_abandoned(self, sandbox_id: str) -> bool:
        """Held by a process that is gone."""
        try:
            words = self._holder(sandbox_id).read_text().split()
        except OSError:
            return False
        return not ProcessRef(int(words[0]), int(words[1])).is_alive()

    async def dump(self, sandbox_id: str, runtime: Runtime, target: Path, deadline: Deadline) -> None:
        """Write the memory of one that is paused to a directory; it stays paused."""
        words = ("checkpoint", "--leave-running", "--compression=none", "--exclude-committed-zero-pages")
        await self._tell(sandbox_id, runtime, *words, "--image-path", str(target), deadline=deadline)

    def is_paused(self, sandbox_id: str) -> bool:
        return self._note(sandbox_id).exists() or self._places.group(sandbox_id).is_frozen()

    def _holder(self, sandbox_id: str) -> Path:
        return self._places.run(sandbox_id) / _HOLDER

    def _note(self, sandbox_id: str) -> Path:
        return self._places.run(sandbox_id) / _NOTE

    async def _tell(self, sandbox_id: str, runtime: Runtime, what: str, *more: str, deadline: Deadline) -> None:
        run = self._places.run(sandbox_id)
        command = runtime.command(run / "runtime", what, *more, sandbox_id, log=run / f"log-{what}")
        finished = await start.run(command, (), deadline, what=f"{runtime.name} {what}")
        if finished.status != 0:
            said = runtimes.last_error(run / f"log-{what}")
            if what == "resume" and "running" in said:  # it was never stopped
                return
            raise EngineError(f"{runtime.name} could not {what} the sandbox: {said or finished.status}")
