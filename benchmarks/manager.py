"""Many sandboxes: side by side, from a warm pool, at once, among many, and after a restart.

They are compared with Docker only if an engine answers that has the image of `benchmarks.docker`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from atoll.engines import registry
from atoll.engines.contract import ByteStream, Engine, EngineDescription
from atoll.manager import PoolSettings, SandboxManager
from atoll.model import Handle, Observation, SandboxSpec, Stats
from atoll.settings import Settings
from benchmarks import rates
from benchmarks.docker import IMAGE
from benchmarks.measure import Figure, take_turns
from benchmarks.rates import PARALLEL, docker, has_docker

ROUNDS = 40
SLOW_CREATES = 50
SLOW_S = 0.5
FEW = 10
MANY = {"native": 1000}
"""Sandboxes alive at once; 100 on other engines."""
RECOVERED = 100


class SlowEngine:
    """Takes half a second to hand over a sandbox that was created before. All further time is the manager's own."""

    def __init__(self, inner: Engine) -> None:
        self.name = inner.name
        self._inner = inner
        self._spares: list[Handle] = []
        self._given: dict[str, Handle] = {}

    async def describe(self) -> EngineDescription:
        return await self._inner.describe()

    async def prepare(self, count: int) -> None:
        made = (self._inner.create(f"spare-{number}", SandboxSpec()) for number in range(count))
        self._spares = list(await asyncio.gather(*made))

    async def create(self, sandbox_id: str, spec: SandboxSpec) -> Handle:
        await asyncio.sleep(SLOW_S)
        self._given[sandbox_id] = self._spares.pop()
        return Handle(self.name, sandbox_id, spec, time.time())

    async def connect(self, handle: Handle) -> ByteStream:
        return await self._inner.connect(self._given[handle.sandbox_id])

    async def inspect(self, handle: Handle) -> Observation:
        return await self._inner.inspect(self._given[handle.sandbox_id])

    async def stats(self, handle: Handle) -> Stats:
        return await self._inner.stats(self._given[handle.sandbox_id])

    async def delete(self, handle: Handle) -> None:
        await self._inner.delete(self._given.get(handle.sandbox_id, handle))

    async def list(self) -> list[Handle]:
        return []

    async def aclose(self) -> None:
        await self._inner.aclose()


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    settings = Settings(data_dir=directory / "data", run_dir=directory / "run")
    many = MANY.get(engine, 100)

    @asynccontextmanager
    async def managing(**options: Any) -> AsyncIterator[SandboxManager]:
        options = {"engine": engine, "settings": settings, "max_sandboxes": 2 * many, **options}
        async with SandboxManager(**options) as manager:
            yield manager

    yield await side_by_side(settings, engine, managing)
    async with managing(pools=[PoolSettings(SandboxSpec(), size=4)]) as manager:
        for figure in await pool_hit(manager):
            yield figure
    if has_docker():
        async with managing() as manager:
            yield await rate(manager)
    async with managing() as manager:
        for figure in await crowd(manager, many):
            yield figure
        await grow(manager, RECOVERED)
        await manager.cleanup(keep=True)
    yield await recovery(managing)


async def side_by_side(settings: Settings, engine: str, managing: Any) -> Figure:
    slow = SlowEngine(registry.get(engine, settings))
    await slow.prepare(SLOW_CREATES)
    async with managing(engine=slow) as manager:
        started = time.perf_counter()
        await asyncio.gather(*(manager.create_sandbox() for _ in range(SLOW_CREATES)))
        elapsed = time.perf_counter() - started
    return Figure(
        f"manager: {SLOW_CREATES} slow creates at once", elapsed, SLOW_S, "s", "one slow create", at_most=1 / SLOW_S
    )


async def pool_hit(manager: SandboxManager) -> list[Figure]:
    plain = await manager.get_sandbox(await manager.create_sandbox({"hostname": "plain"}))

    async def once() -> None:
        assert (await plain.exec(["true"])).success

    async def claim() -> float:
        [pool] = manager.get_stats()["pools"].values()  # type: ignore[attr-defined]
        while pool["ready"] < pool["target"]:
            await asyncio.sleep(0.01)
            [pool] = manager.get_stats()["pools"].values()  # type: ignore[attr-defined]
        started = time.perf_counter()
        id = await manager.create_sandbox()
        assert (await (await manager.get_sandbox(id)).exec(["true"])).success
        elapsed = time.perf_counter() - started
        await manager.delete_sandbox(id)
        return elapsed

    async def docker_run() -> None:
        await docker("run", "--rm", "--network", "none", IMAGE, "true")

    found = await take_turns({"exec": once, "claim": claim}, ROUNDS)
    name, ours = "manager: claim from a pool to first result, p50", found["claim"].p50 * 1e3
    detail = {"p99": found["claim"].p99 * 1e3}
    figures = [Figure(name, ours, found["exec"].p50 * 1e3, "ms", "exec true", at_most=2.0, detail=detail)]
    if has_docker():
        found = await take_turns({"docker": docker_run, "claim": claim}, ROUNDS // 4, warm_up=1)
        ours, peer = found["claim"].p50 * 1e3, found["docker"].p50 * 1e3
        figures.append(Figure(f"{name}, and Docker", ours, peer, "ms", "docker run true", at_most=1 / 50))
    return figures


async def rate(manager: SandboxManager) -> Figure:
    async def cycle() -> None:
        id = await manager.create_sandbox()
        assert (await (await manager.get_sandbox(id)).exec(["true"])).success
        await manager.delete_sandbox(id)

    return await rates.against_docker("manager", cycle, at_least=5.0)


async def grow(manager: SandboxManager, count: int) -> None:
    """Create or delete sandboxes until there are `count`."""
    records = await manager.list_sandboxes()
    missing, surplus = iter(range(count - len(records))), iter(records[: max(0, len(records) - count)])

    async def worker() -> None:
        for _ in missing:
            await manager.create_sandbox()
        for record in surplus:
            await manager.delete_sandbox(record.id)

    await asyncio.gather(*(worker() for _ in range(PARALLEL)))


async def crowd(manager: SandboxManager, many: int) -> list[Figure]:
    """Compare the latency among many living sandboxes with that among few, which is measured before and after."""
    first = await manager.get_sandbox(await manager.create_sandbox())

    async def create() -> float:
        started = time.perf_counter()
        id = await manager.create_sandbox()
        elapsed = time.perf_counter() - started
        await manager.delete_sandbox(id)
        return elapsed

    async def command() -> None:
        assert (await first.exec(["true"])).success

    found = []
    for count in (FEW, many, FEW):
        await grow(manager, count)
        found.append(await take_turns({"create": create, "exec": command}, ROUNDS))
    before, among, after = found
    return [
        Figure(
            f"manager: {what} among {many} sandboxes, p50",
            among[what].p50 * 1e3,
            (before[what].p50 + after[what].p50) / 2 * 1e3,
            "ms",
            f"among {FEW}",
            at_most=1.3,
        )
        for what in ("create", "exec")
    ]


async def recovery(managing: Any) -> Figure:
    """Measure the start of a manager whose sandboxes already exist."""
    started = time.perf_counter()
    async with managing() as manager:
        recovered = time.perf_counter() - started
        records = await manager.list_sandboxes()
        assert len(records) == RECOVERED
        started = time.perf_counter()
        for _ in range(10):
            await manager.delete_sandbox(await manager.create_sandbox())
        making = (time.perf_counter() - started) / 10 * RECOVERED
    return Figure(
        f"manager: recovery of {RECOVERED} sandboxes", recovered, making, "s", "making and deleting them", at_most=0.5
    )
