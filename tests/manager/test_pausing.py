from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from atoll.errors import EngineError, SandboxPausedError, UnsupportedError
from atoll.manager import LimitReachedError, PausedBy, SandboxManager
from atoll.model import State
from atoll.settings import Settings
from manager.engines import Restless, TroubledEngine
from manager.times import ManualClock
from manager.waiting import until

Make = Callable[..., SandboxManager]


ENGINES = ("native", "oci", "bubblewrap")
"""Those that can pause."""


async def paused(engine: TroubledEngine) -> set[str]:
    return {handle.sandbox_id for handle in await engine.list() if (await engine.inspect(handle)).state is State.PAUSED}


async def test_a_paused_sandbox_stands_still_until_it_is_resumed_and_says_so(make_manager: Make) -> None:
    manager = make_manager()
    id = await manager.create_sandbox()
    sandbox = await manager.get_sandbox(id)
    await (await sandbox.start("i=0; while :; do i=$((i+1)); echo $i > count.new; mv count.new count; done")).detach()
    await manager.pause_sandbox(id)
    await manager.pause_sandbox(id)
    assert (await manager.describe(id)).state is State.PAUSED
    with pytest.raises(SandboxPausedError, match="is paused"):
        await sandbox.exec("echo awake")
    await manager.resume_sandbox(id)
    assert (await sandbox.exec("echo awake")).stdout == "awake\n"
    assert (await manager.describe(id)).state is State.RUNNING
    await manager.resume_sandbox(id)


async def test_pausing_is_refused_where_the_engine_cannot(make_manager: Make, settings: Settings) -> None:
    manager = make_manager(engine=Restless(settings))
    id = await manager.create_sandbox()
    with pytest.raises(UnsupportedError, match="cannot pause"):
        await manager.pause_sandbox(id)


async def test_at_the_cap_the_longest_idle_is_paused(
    make_manager: Make, clock: ManualClock, engine: TroubledEngine
) -> None:
    manager = make_manager(max_sandboxes=2, at_cap="pause", clock=clock)
    old = await manager.create_sandbox()
    clock.advance(10)
    new = await manager.create_sandbox()
    clock.advance(10)
    await (await manager.get_sandbox(old)).exec("true")
    clock.advance(10)
    third = await manager.create_sandbox()
    states = {record.id: record.state for record in await manager.list_sandboxes()}
    assert states == {old: State.RUNNING, new: State.PAUSED, third: State.RUNNING}
    # Using the one that sleeps wakes it, and another one goes to sleep for it.
    assert (await (await manager.get_sandbox(new)).exec("true")).success
    assert len(await paused(engine)) == 1
    assert new not in await paused(engine)


async def test_the_one_that_made_way_comes_back_and_the_other_makes_way(
    make_manager: Make, engine: TroubledEngine
) -> None:
    manager = make_manager(max_sandboxes=1, at_cap="pause")
    first = await manager.create_sandbox(owner="ann")
    second = await manager.create_sandbox(owner="ann")
    for asleep, wanted in ((first, second), (second, first), (first, second)):
        await manager.resume_sandbox(wanted)
        assert await paused(engine) == {asleep}
        assert (await manager.describe(asleep)).paused_by is PausedBy.ROOM
    assert (await (await manager.get_sandbox(first)).exec("true")).success
    assert await paused(engine) == {second}


async def test_a_start_pauses_nobody_elses_unless_the_rules_say_so(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager(max_sandboxes=1, at_cap="pause")
    id = await manager.create_sandbox(owner="ann")
    with pytest.raises(LimitReachedError):
        await manager.create_sandbox(owner="bob")
    assert await paused(engine) == set()
    await manager.cleanup(keep=True)
    generous = make_manager(max_sandboxes=1, at_cap="pause-any")
    await generous.create_sandbox(owner="bob")
    assert await paused(engine) == {id}


async def test_one_in_use_is_never_paused_to_make_room(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager(max_sandboxes=1, at_cap="pause")
    id = await manager.create_sandbox()
    async with manager.sandbox_operation(id):
        with pytest.raises(LimitReachedError):
            await manager.create_sandbox()
    await manager.create_sandbox()
    assert await paused(engine) == {id}


async def test_how_many_may_sleep_is_limited_too(make_manager: Make) -> None:
    manager = make_manager(max_sandboxes=1, at_cap="pause", max_paused=2)
    for _ in range(3):
        await manager.create_sandbox()
    with pytest.raises(LimitReachedError):
        await manager.create_sandbox()


async def test_the_cap_on_those_awake_is_exact_under_many_callers(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager(max_sandboxes=3, at_cap="pause", max_paused=50)
    most = 0

    def awake() -> int:
        wiring = manager._wiring
        assert wiring is not None
        return sum(
            member.record.state in (State.RUNNING, State.STARTING) or member.record.act == "resume"
            for member in wiring.context.members
        )

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, awake())
            await asyncio.sleep(0)

    ids = [await manager.create_sandbox()]
    watching = asyncio.ensure_future(watch())

    async def client(number: int) -> None:
        try:
            id = await manager.create_sandbox()
            await (await manager.get_sandbox(ids[0])).exec("true")
            await (await manager.get_sandbox(id)).exec("true")
        except LimitReachedError:
            pass

    await asyncio.gather(*(client(number) for number in range(12)))
    watching.cancel()
    assert most <= 3


async def test_a_pause_that_fails_leaves_it_running(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager()
    id = await manager.create_sandbox()
    engine.failing.add("pause")
    with pytest.raises(EngineError):
        await manager.pause_sandbox(id)
    assert (await manager.describe(id)).state is State.RUNNING
    assert (await (await manager.get_sandbox(id)).exec("true")).success


async def test_a_pause_goes_on_without_its_caller_and_a_delete_waits_for_it(
    make_manager: Make, engine: TroubledEngine
) -> None:
    manager = make_manager()
    id = await manager.create_sandbox()
    engine.delays["pause"] = 0.1
    pausing = asyncio.ensure_future(manager.pause_sandbox(id))
    await until(lambda: engine.calls["pause"])
    pausing.cancel()
    deleting = asyncio.ensure_future(manager.delete_sandbox(id))
    await asyncio.gather(pausing, return_exceptions=True)
    assert await deleting
    assert await engine.list() == []


async def test_one_that_sleeps_is_adopted_asleep(make_manager: Make, engine: TroubledEngine) -> None:
    first = make_manager()
    id = await first.create_sandbox()
    await first.pause_sandbox(id)
    await first.cleanup(keep=True)
    second = make_manager()
    await second.start()
    assert (await second.describe(id)).state is State.PAUSED
    with pytest.raises(SandboxPausedError):
        await (await second.get_sandbox(id)).exec("true")
    await second.resume_sandbox(id)
    assert (await (await second.get_sandbox(id)).exec("true")).success
