from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from atoll import Cause, SandboxGoneError
from atoll.manager import SandboxManager
from atoll.model import State
from manager.engines import TroubledEngine
from manager.times import ManualClock
from manager.waiting import until

Make = Callable[..., SandboxManager]


async def test_an_idle_sandbox_is_ended_with_its_cause_and_a_used_one_is_not(
    make_manager: Make, clock: ManualClock
) -> None:
    manager = make_manager(idle_timeout=100, cleanup_interval=10, clock=clock)
    idle, used = await manager.create_sandbox(), await manager.create_sandbox()
    clock.advance(60)
    await (await manager.get_sandbox(used)).exec("true")
    clock.advance(60)
    await manager.cleanup_idle()
    assert [record.id for record in await manager.list_sandboxes()] == [used]
    gone = await manager.describe(idle)
    assert (gone.cause, gone.reason) == (Cause.POLICY, "nobody used it for 100 s")


async def test_the_reaper_comes_by_itself(make_manager: Make, clock: ManualClock) -> None:
    manager = make_manager(idle_timeout=100, cleanup_interval=30, clock=clock)
    id = await manager.create_sandbox()
    member = manager._wiring.context.members.get(id)  # type: ignore[union-attr]
    for seconds in (30, 20, 10, 30, 10):  # the interval, half of the time, and its end
        await until(lambda seconds=seconds: seconds in clock.sleeps())  # type: ignore[misc]
        clock.advance(seconds)
        if seconds == 20:  # looked at for the first time, by the clock of now
            await until(lambda: member.background is not None)
    assert (await manager.wait_until(id, State.MISSING)).cause is Cause.POLICY


@pytest.mark.parametrize("use", ["exec", "run_command", "shell", "wait", "operation", "read_stream"])
async def test_one_in_use_is_never_ended_however_long_and_silent_the_use(
    make_manager: Make, clock: ManualClock, use: str
) -> None:
    manager = make_manager(idle_timeout=100, cleanup_interval=10, clock=clock)
    id = await manager.create_sandbox()
    sandbox = await manager.get_sandbox(id)
    wait = "until test -e stop; do sleep 0.01; done"
    stop = asyncio.Event()

    async def work() -> None:
        if use == "exec":
            await sandbox.exec(wait)
        elif use == "run_command":
            await sandbox.run_command(wait)
        elif use == "shell":
            await sandbox.shell("other").run(wait, 30)
        elif use == "wait":
            await (await sandbox.start(wait)).wait()
        elif use == "operation":
            async with manager.sandbox_operation(id):
                await stop.wait()
        else:
            await sandbox.write_file("big", b"x" * 10_000)
            async for _ in sandbox.read_stream("big"):
                await stop.wait()

    task = asyncio.ensure_future(work())
    await until(lambda: manager.get_stats()["active_operations"] == 1)
    for _ in range(3):
        clock.advance(1000)
        await manager.cleanup_idle()
    assert [record.id for record in await manager.list_sandboxes()] == [id]
    stop.set()
    await sandbox.write_file("stop", "")
    await task
    # Use counts from its end.
    clock.advance(99)
    await manager.cleanup_idle()
    assert len(await manager.list_sandboxes()) == 1
    # The last byte of the last answer may come a moment after the clock went on; nothing comes after that.
    async with asyncio.timeout(20):
        while await manager.list_sandboxes():
            clock.advance(101)
            await manager.cleanup_idle()


async def test_bytes_of_a_terminal_are_a_use(make_manager: Make, clock: ManualClock) -> None:
    manager = make_manager(idle_timeout=100, cleanup_interval=10, clock=clock)
    id = await manager.create_sandbox()
    terminal = await (await manager.get_sandbox(id)).open_terminal("cat")
    output = aiter(terminal)
    for _ in range(3):
        clock.advance(80)
        await terminal.write("hello\n")
        await anext(output)
        await manager.cleanup_idle()
    assert len(await manager.list_sandboxes()) == 1


async def test_a_background_command_that_writes_keeps_its_sandbox_and_a_silent_one_does_not(
    make_manager: Make, clock: ManualClock
) -> None:
    manager = make_manager(idle_timeout=100, cleanup_interval=10, clock=clock)
    busy, silent = await manager.create_sandbox(), await manager.create_sandbox()
    for id, line in ((busy, "while :; do echo work; sleep 0.01; done"), (silent, "sleep 1000")):
        command = await (await manager.get_sandbox(id)).start(line)
        await command.detach()
    for _ in range(4):
        clock.advance(60)
        await manager.cleanup_idle()
        [work] = await (await manager.get_sandbox(busy)).commands()
        before = await _written(manager, busy)
        async with asyncio.timeout(10):
            while await _written(manager, busy) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        _member(manager, busy).usage.last = clock.now() - 60  # asking was no use by anybody
        assert work
    assert [record.id for record in await manager.list_sandboxes()] == [busy]


async def test_a_use_that_begins_while_the_reaper_looks_wins(
    make_manager: Make, clock: ManualClock, engine: TroubledEngine
) -> None:
    manager = make_manager(idle_timeout=100, cleanup_interval=10, clock=clock)
    id = await manager.create_sandbox()
    sandbox = await manager.get_sandbox(id)
    _member(manager, id).usage.last = clock.now() - 1000  # the clock stands: only this sweep can end it
    engine.hanging.add("inspect")
    before = engine.calls["inspect"]
    sweep = asyncio.ensure_future(manager.cleanup_idle())
    await until(lambda: engine.calls["inspect"] > before)
    work = asyncio.ensure_future(sandbox.exec("sleep 0.3; echo alive"))
    await asyncio.sleep(0)  # the use has begun
    engine.heal()
    await sweep
    assert (await work).stdout == "alive\n"


async def test_a_use_after_the_reaper_decided_is_told_why(
    make_manager: Make, clock: ManualClock, engine: TroubledEngine
) -> None:
    manager = make_manager(idle_timeout=100, cleanup_interval=10, clock=clock)
    sandbox = await manager.get_sandbox(await manager.create_sandbox())
    clock.advance(1000)
    engine.delays["delete"] = 0.1
    sweep = asyncio.ensure_future(manager.cleanup_idle())
    await until(lambda: engine.calls["delete"])
    with pytest.raises(SandboxGoneError, match="nobody used it"):
        await sandbox.exec("true")
    await sweep


async def test_one_that_died_is_noticed_kept_with_its_cause_and_removed_later(
    make_manager: Make, clock: ManualClock, engine: TroubledEngine
) -> None:
    manager = make_manager(idle_timeout=100, cleanup_interval=10, clock=clock)
    id = await manager.create_sandbox()
    await engine.kill_agent(id)
    await manager.cleanup_idle()
    [record] = await manager.list_sandboxes()
    assert record.state is State.STOPPED
    assert record.cause in (Cause.KILLED, Cause.LOST)  # not every engine can tell
    clock.advance(101)
    await manager.cleanup_idle()
    assert await manager.list_sandboxes() == []
    assert (await manager.describe(id)).cause is record.cause


async def test_one_broken_sandbox_does_not_delay_the_others(
    make_manager: Make, clock: ManualClock, engine: TroubledEngine
) -> None:
    manager = make_manager(idle_timeout=100, cleanup_interval=10, clock=clock)
    await manager.create_sandbox()
    clock.advance(1000)
    engine.hanging.add("delete")
    sweep = asyncio.ensure_future(manager.cleanup_idle())
    await until(lambda: engine.calls["delete"])
    other = await manager.create_sandbox()
    assert (await (await manager.get_sandbox(other)).exec("true")).success
    engine.heal()
    await sweep


async def test_a_clock_that_jumps_ends_nothing(make_manager: Make, clock: ManualClock) -> None:
    manager = make_manager(idle_timeout=100, cleanup_interval=10, clock=clock)
    id = await manager.create_sandbox(lifetime=50)
    for jump in (10**6, -(10**6)):
        clock.jump = jump
        await manager.cleanup_idle()
        assert [record.id for record in await manager.list_sandboxes()] == [id]


def _member(manager: SandboxManager, id: str):  # type: ignore[no-untyped-def]
    wiring = manager._wiring
    assert wiring is not None
    return wiring.context.members.get(id)


async def _written(manager: SandboxManager, id: str) -> int:
    wiring = manager._wiring
    assert wiring is not None
    seen = await wiring.health.background(wiring.context.members.get(id))
    assert seen is not None
    return seen.output_bytes
