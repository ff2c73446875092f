"""Ends of life come on time, whatever made or changed them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from atoll import Cause, PoolSettings, SandboxSpec
from atoll.manager import SandboxManager
from atoll.model import State
from atoll.timer import SystemClock
from manager.times import ManualClock
from manager.waiting import until

Make = Callable[..., SandboxManager]
LIFETIME_S = 1.0


async def create(manager: SandboxManager) -> str:
    return await manager.create_sandbox(lifetime=LIFETIME_S)


async def claim(manager: SandboxManager) -> str:
    await until(lambda: manager.get_stats()["pools"][next(iter(manager.get_stats()["pools"]))]["ready"])  # type: ignore[index, call-overload]
    return await manager.create_sandbox(lifetime=LIFETIME_S)


async def fork(manager: SandboxManager) -> str:
    source = await manager.create_sandbox()
    [id] = await manager.fork_sandbox(source, lifetime=LIFETIME_S)
    return id


async def extend(manager: SandboxManager) -> str:
    id = await manager.create_sandbox(lifetime=1000)
    await manager.extend_lifetime(id, LIFETIME_S)
    return id


async def resume(manager: SandboxManager) -> str:
    id = await manager.create_sandbox(lifetime=LIFETIME_S)
    await manager.pause_sandbox(id)
    await manager.resume_sandbox(id)
    return id


async def pause(manager: SandboxManager) -> str:
    id = await manager.create_sandbox(lifetime=LIFETIME_S)
    await manager.pause_sandbox(id)
    return id


ENGINES = ("native", "oci")


@pytest.mark.parametrize("path", [create, claim, fork, extend, resume, pause], ids=lambda path: path.__name__)
async def test_a_lifetime_ends_within_a_second_of_its_time(make_manager: Make, path: Callable[..., object]) -> None:
    pools = [PoolSettings(SandboxSpec(), size=1)] if path is claim else []
    manager = make_manager(pools=pools)
    await manager.start()
    id = await path(manager)  # type: ignore[misc]
    record = await manager.describe(id)
    assert record.expires_at is not None
    assert record.expires_at > time.time() - 1
    gone = await manager.wait_until(id, State.MISSING, timeout=5)
    assert gone.cause is Cause.TIMEOUT
    assert gone.ended_at is not None
    assert 0 <= gone.ended_at - record.expires_at < 1


async def test_one_that_was_adopted_ends_on_time(make_manager: Make) -> None:
    first = make_manager()
    id = await first.create_sandbox(lifetime=1.5)
    expires = (await first.describe(id)).expires_at
    await first.cleanup(keep=True)
    second = make_manager()
    await second.start()
    gone = await second.wait_until(id, State.MISSING, timeout=5)
    assert gone.ended_at is not None
    assert expires is not None
    assert 0 <= gone.ended_at - expires < 1


async def test_a_lifetime_begins_when_the_sandbox_is_ready(make_manager: Make, engine: object) -> None:
    engine.delays["create"] = 0.5  # type: ignore[attr-defined]
    manager = make_manager()
    asked = time.time()
    id = await manager.create_sandbox(lifetime=100)
    record = await manager.describe(id)
    assert record.expires_at is not None
    assert record.expires_at >= asked + 100.5


async def test_the_end_that_is_shown_follows_a_clock_that_was_set(make_manager: Make, clock: ManualClock) -> None:
    manager = make_manager(clock=clock)
    id = await manager.create_sandbox(lifetime=500)
    clock.jump = 10**6
    await manager.cleanup_idle()
    record = await manager.describe(id)
    assert record.expires_at == pytest.approx(clock.wall() + 500)
    clock.advance(501)
    assert (await manager.wait_until(id, State.MISSING, timeout=5)).cause is Cause.TIMEOUT


async def test_an_idle_sandbox_ends_when_its_time_is_over_not_at_the_next_interval(
    make_manager: Make, clock: ManualClock
) -> None:
    manager = make_manager(idle_timeout=100, cleanup_interval=1000, clock=clock)
    id = await manager.create_sandbox()
    for _ in range(2):
        await until(lambda: 50 in clock.sleeps())
        clock.advance(50)
    assert (await manager.wait_until(id, State.MISSING, timeout=5)).cause is Cause.POLICY


async def test_the_clock_of_the_machine_wakes_sleepers_on_time_and_when_it_is_told() -> None:
    clock = SystemClock()
    started = clock.now()
    await clock.sleep(0.2)
    assert 0.2 <= clock.now() - started < 1
    sleeping = asyncio.ensure_future(clock.sleep(1000))
    await asyncio.sleep(0)
    sleeping.cancel()
    await asyncio.gather(sleeping, return_exceptions=True)
