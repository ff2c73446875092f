"""Start commands and ready checks in a manager: pools of what is ready, neighbours, and callers that go away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from atoll.errors import StartError
from atoll.manager import PoolSettings, SandboxManager
from atoll.model import SandboxSpec
from manager.engines import TroubledEngine
from manager.times import ManualClock
from manager.waiting import until
from needs import not_applicable

Make = Callable[..., SandboxManager]
UP = {"name": "up", "command": "sleep 0.2; touch up; exec sleep 1000"}
READY = SandboxSpec.of(start=[UP], ready={"command": "test -e up"})
NEVER = SandboxSpec.of(start=["exec sleep 1000"], ready={"command": "false", "timeout_s": 600})


def figures(manager: SandboxManager) -> dict[str, Any]:
    [found] = manager.get_stats()["pools"].values()  # type: ignore[attr-defined]
    assert isinstance(found, dict)
    return found


async def test_a_pool_holds_sandboxes_that_are_ready(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager(pools=[PoolSettings(READY, size=1, pace_s=0.0)])
    await manager.start()
    await until(lambda: figures(manager)["ready"] == 1)
    (spare,) = [handle.sandbox_id for handle in await engine.list()]
    claimed = await manager.get_sandbox(await manager.create_sandbox(READY))
    assert claimed.id == spare
    (state,) = await claimed.start_commands()
    assert (state.name, state.state) == ("up", "running")
    assert await claimed.exists("up")


async def test_a_pool_backs_off_while_its_spec_is_never_ready(
    make_manager: Make, engine: TroubledEngine, clock: ManualClock
) -> None:
    spec = SandboxSpec.of(start=[{"command": "exit 7", "restart": "never"}], ready={"command": "false"})
    manager = make_manager(pools=[PoolSettings(spec, size=1, parallel=1)], clock=clock, cleanup_interval=10**6)
    await manager.start()
    waits = []
    for tries in range(1, 4):
        await until(lambda: figures(manager)["failures"] == tries)  # noqa: B023
        await until(lambda: any(wait < 10**5 for wait in clock.sleeps()))
        waits.append(clock.sleeps()[0])
        clock.advance(waits[-1])
    assert all(0.375 * 2**n <= wait <= 0.625 * 2**n for n, wait in enumerate(waits))


async def test_a_neighbour_that_is_never_ready_delays_nobody(make_manager: Make) -> None:
    manager = make_manager()
    await manager.start()
    slow = [asyncio.create_task(manager.create_sandbox(NEVER, owner="slow")) for _ in range(6)]
    async with asyncio.timeout(20):
        for _ in range(3):
            await manager.create_sandbox(READY, owner="other")
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_a_caller_that_is_gone_while_it_waits_leaves_nothing(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager()
    await manager.start()
    creating = asyncio.create_task(manager.create_sandbox(NEVER))
    async with asyncio.timeout(20):
        while not await engine.list():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert await engine.list() == []


async def test_a_failure_says_what_the_commands_wrote(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager()
    await manager.start()
    with pytest.raises(StartError, match="'db' ended with exit code 5: no space for the log") as caught:
        await manager.create_sandbox(
            start=[{"name": "db", "command": "echo no space for the log >&2; exit 5", "restart": "never"}],
            ready={"command": "false", "timeout": 60},
        )
    assert caught.value.output == "no space for the log\n"
    assert await engine.list() == []
    assert await manager.list_sandboxes() == []


async def test_forks_run_the_start_commands_too(make_manager: Make, engine_name: str) -> None:
    if engine_name != "native":
        not_applicable(f"{engine_name} has no checkpoints")
    manager = make_manager()
    await manager.start()
    source = await manager.get_sandbox(await manager.create_sandbox(READY))
    (fork,) = await source.fork()
    assert [each.state for each in await fork.start_commands()] == ["running"]
    await source.restart()
    assert [each.state for each in await source.start_commands()] == ["running"]
