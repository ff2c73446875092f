"""Limits and policies that are changed through a manager: its journal always agrees with the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.engines.contract import GarbageCollecting, NetworkPolicies, Resizable, supporting
from atoll.manager import SandboxManager
from atoll.model import Limits
from manager.engines import TroubledEngine
from needs import not_applicable

Make = Callable[..., SandboxManager]


async def test_a_change_is_written_down_and_outlives_the_manager(make_manager: Make, engine: TroubledEngine) -> None:
    if not isinstance(engine, Resizable):
        not_applicable("this engine changes no limits")
    manager = make_manager()
    id = await manager.create_sandbox({"pids": 30})
    sandbox = await manager.get_sandbox(id)
    found = await sandbox.set_limits(pids=50, memory="100m")
    record = await manager.describe(id)
    assert (record.spec.limits.pids, record.spec.limits.memory_bytes) == (50, 100 << 20)
    assert found == await sandbox.info()
    await manager.cleanup(keep=True)
    again = make_manager()
    assert (await again.describe(id)).spec.limits == record.spec.limits
    [fork] = await (await again.get_sandbox(id)).fork()
    assert (await again.describe(fork.id)).spec.limits == record.spec.limits


async def test_a_change_that_was_made_but_not_written_down_is_learned_from_the_engine(
    make_manager: Make, engine: TroubledEngine
) -> None:
    if not isinstance(engine, Resizable):
        not_applicable("this engine changes no limits")
    manager = make_manager()
    id = await manager.create_sandbox({"pids": 30})
    await manager.cleanup(keep=True)
    [handle] = await engine.list()
    await engine.set_limits(handle, Limits(pids=50))
    again = make_manager()
    assert (await again.describe(id)).spec.limits.pids == 50


async def test_a_cancelled_change_is_whole(make_manager: Make, engine: TroubledEngine) -> None:
    """In the engine and in the journal, or in neither."""
    if not isinstance(engine, Resizable):
        not_applicable("this engine changes no limits")
    manager = make_manager()
    id = await manager.create_sandbox({"pids": 30})
    sandbox = await manager.get_sandbox(id)
    for number in range(31, 61):
        task = asyncio.create_task(sandbox.set_limits(pids=number))
        for _ in range(number - 31):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        [handle] = await engine.list()
        assert (await manager.describe(id)).spec.limits == handle.spec.limits


async def test_a_cancelled_change_of_the_policy_is_whole(make_manager: Make, engine: TroubledEngine) -> None:
    if await supporting(engine, NetworkPolicies) is None:
        not_applicable("this engine enforces no policies")
    manager = make_manager()
    id = await manager.create_sandbox({"network": {"allowed_domains": ["a.example"]}})
    sandbox = await manager.get_sandbox(id)
    for number in range(30):
        task = asyncio.create_task(sandbox.set_network({"allowed_domains": [f"a{number}.example"]}))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        [handle] = await engine.list()
        assert (await manager.describe(id)).spec.network == handle.spec.network
    await manager.cleanup()
    assert isinstance(engine, GarbageCollecting)
    await engine.gc()  # ends the gateway, which no sandbox needs any more
