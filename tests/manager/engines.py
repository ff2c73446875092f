"""The real `process` engine, which can be told to be slow, to fail or to hang, and to pause by stopping processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import suppress

from atoll.engines.local.processes import ProcessRef, descendants, kill
from atoll.engines.local.waiting import Deadline
from atoll.engines.process import ProcessEngine
from atoll.errors import EngineError
from atoll.model import Capability, Handle, Observation, SandboxSpec, State
from atoll.settings import Settings


class TroubledEngine(ProcessEngine):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.calls: Counter[str] = Counter()
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.delays: dict[str, float] = {}
        self.most_at_once = 0
        self._creating = 0

    def heal(self) -> None:
        self.failing.clear()
        self.hanging.clear()
        self.delays.clear()

    async def _trouble(self, what: str) -> None:
        self.calls[what] += 1
        while what in self.hanging:
            # Not even being cancelled ends it.
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
        await asyncio.sleep(self.delays.get(what, 0))
        if what in self.failing:
            raise EngineError(f"the engine is told to fail to {what}")

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> Handle:
        self._creating += 1
        self.most_at_once = max(self.most_at_once, self._creating)
        try:
            await self._trouble("create")
            return await super().create(sandbox_id, spec)
        finally:
            self._creating -= 1

    async def delete(self, handle: Handle) -> None:
        await self._trouble("delete")
        await super().delete(handle)

    async def inspect(self, handle: Handle) -> Observation:
        await self._trouble("inspect")
        return await super().inspect(handle)

    async def list(self) -> list[Handle]:
        await self._trouble("list")
        return await super().list()

    async def kill_agent(self, sandbox_id: str) -> None:
        """Returns when it is dead."""
        agent = ProcessRef.of(self.agent_pid(sandbox_id))
        assert agent is not None
        assert await kill({agent}, Deadline.after(20))

    def agent_pid(self, sandbox_id: str) -> int:
        record = self._records.read(sandbox_id)
        assert record is not None
        assert record.init is not None
        return record.init.pid


class PausableEngine(TroubledEngine):
    """Pauses for real, by stopping every process from outside."""

    capabilities = TroubledEngine.capabilities | {Capability.PAUSE}

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.paused: set[str] = set()

    async def pause(self, handle: Handle) -> None:
        await self._trouble("pause")
        self._signal(handle, signal.SIGSTOP)
        self.paused.add(handle.sandbox_id)

    async def resume(self, handle: Handle) -> None:
        await self._trouble("resume")
        self._signal(handle, signal.SIGCONT)
        self.paused.discard(handle.sandbox_id)

    async def inspect(self, handle: Handle) -> Observation:
        seen = await super().inspect(handle)
        if seen.state is State.RUNNING and handle.sandbox_id in self.paused:
            return Observation(State.PAUSED)
        return seen

    def _signal(self, handle: Handle, number: signal.Signals) -> None:
        first = self.agent_pid(handle.sandbox_id)
        for pid in [first, *descendants(first)]:
            with suppress(ProcessLookupError):  # it ended by itself meanwhile
                os.kill(pid, number)
