"""Whatever moment a caller gives up at, nothing is half made."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from atoll.manager import PoolSettings, SandboxManager
from atoll.model import SandboxSpec
from manager.engines import TroubledEngine
from manager.waiting import until

Make = Callable[..., SandboxManager]


async def cancelled_after(work: Coroutine[Any, Any, Any], steps: int) -> Any:
    """What came of it when it was cancelled after so many turns of the event loop; None if it was."""
    task = asyncio.ensure_future(work)
    for step in range(steps):
        # The first turns go by without anything arriving from outside; later ones let the machine do its part.
        await asyncio.sleep(0 if step < 12 else 0.0008)
    task.cancel()
    await asyncio.wait({task})
    return None if task.cancelled() else task.result()


@pytest.mark.parametrize("first_step", range(4))
async def test_a_cancelled_create_leaves_nothing(
    manager: SandboxManager, engine: TroubledEngine, first_step: int
) -> None:
    for steps in range(first_step, 64, 4):
        id = await cancelled_after(manager.create_sandbox(name="x", key="k"), steps)
        if id is not None:
            await manager.delete_sandbox(id)
        assert await manager.list_sandboxes() == []
        assert await engine.list() == []


async def test_a_cancelled_claim_leaves_nothing_and_spoils_nothing(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager(pools=[PoolSettings(SandboxSpec(), size=3, pace_s=0.001)])
    await manager.start()
    for steps in range(12):
        await until(lambda: _pool(manager)["ready"] == 3)
        id = await cancelled_after(manager.create_sandbox(name="x"), steps)
        if id is not None:
            await manager.delete_sandbox(id)
        assert await manager.list_sandboxes() == []
    await until(lambda: _pool(manager)["ready"] == 3)
    assert len(await engine.list()) == 3


async def test_a_delete_goes_on_without_its_caller(manager: SandboxManager, engine: TroubledEngine) -> None:
    for steps in range(16):
        id = await manager.create_sandbox()
        await cancelled_after(manager.delete_sandbox(id), steps)
        await manager.delete_sandbox(id)
        assert await engine.list() == []


async def test_one_who_gives_up_does_not_take_it_from_the_others(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager()
    dice = random.Random(1)
    engine.delays["create"] = 0.03
    for _ in range(8):
        tasks = [asyncio.ensure_future(manager.get_or_create("shared")) for _ in range(4)]
        await asyncio.sleep(dice.random() * 0.08)
        for task in tasks[:3]:
            task.cancel()
        id = await tasks[3]
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await (await manager.get_sandbox(id)).exec(["true"])).success
        await manager.delete_sandbox(id)
    assert await engine.list() == []


async def test_when_all_give_up_it_is_given_up(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager()
    engine.delays["create"] = 0.05
    tasks = [asyncio.ensure_future(manager.get_or_create("shared")) for _ in range(4)]
    await until(lambda: engine.calls["create"])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await manager.list_sandboxes() == []
    assert await engine.list() == []


async def test_opening_and_closing_survive_a_caller_who_gives_up(make_manager: Make, engine: TroubledEngine) -> None:
    for steps in range(0, 24, 3):
        manager = make_manager()
        await cancelled_after(manager.start(), steps)
        await manager.create_sandbox()
        await cancelled_after(manager.cleanup(), steps)
        await manager.cleanup()
        assert await engine.list() == []


def _pool(manager: SandboxManager) -> dict[str, int]:
    [figures] = manager.get_stats()["pools"].values()  # type: ignore[attr-defined]
    assert isinstance(figures, dict)
    return figures
