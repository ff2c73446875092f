"""Real engines, which can be told to be slow, to fail or to hang."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from atoll.engines.bubblewrap.engine import BubblewrapEngine
from atoll.engines.host.process_ref import ProcessRef, kill
from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.engines.process_tree.process_record import Records
from atoll.errors import EngineError
from atoll.model import Capability, Handle, Limits, Observation, SandboxSpec
from atoll.settings import Settings
from atoll.waiting import Deadline

if TYPE_CHECKING:
    _Real = BubblewrapEngine
else:
    _Real = object


class TroubledEngine(_Real):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.settings = settings
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
        record = self.records().read(sandbox_id)
        assert record is not None
        assert record.init is not None
        return record.init.pid

    def records(self) -> Records:
        """What the engine has written down of its sandboxes."""
        return self._records


class _Pausing(TroubledEngine):
    """Those that pause."""

    async def pause(self, handle: Handle) -> None:
        await self._trouble("pause")
        await super().pause(handle)

    async def resume(self, handle: Handle) -> None:
        await self._trouble("resume")
        await super().resume(handle)


class TroubledProcess(_Pausing, BubblewrapEngine):
    pass


class Restless(TroubledProcess):
    """One that cannot pause."""

    capabilities = BubblewrapEngine.capabilities - {Capability.PAUSE}


class _Kernel(_Pausing):
    """Those with control groups."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        # The next test would only have to mount the empty pool again.
        self.layout.close = lambda: None  # type: ignore[attr-defined]

    def records(self) -> Records:
        return self.layout.records  # type: ignore[attr-defined, no-any-return]

    async def set_limits(self, handle: Handle, limits: Limits) -> Handle:
        await self._trouble("set_limits")
        return await super().set_limits(handle, limits)  # type: ignore[misc, no-any-return]


class TroubledNative(_Kernel, NativeEngine):  # type: ignore[misc]
    pass


class TroubledOci(_Kernel, OciEngine):  # type: ignore[misc]
    pass


TROUBLED: dict[str, type[TroubledEngine]] = {
    "native": TroubledNative,
    "bubblewrap": TroubledProcess,
    "oci": TroubledOci,
}
