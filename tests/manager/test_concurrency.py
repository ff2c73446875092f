from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from atoll.errors import SandboxError, SandboxNotFoundError
from atoll.manager import LimitReachedError, SandboxManager
from manager.engines import TroubledEngine
from manager.waiting import until

Make = Callable[..., SandboxManager]


async def test_sandboxes_are_made_side_by_side_and_nothing_waits_behind_a_slow_one(
    make_manager: Make, engine: TroubledEngine
) -> None:
    manager = make_manager()
    ready = await manager.create_sandbox()
    engine.delays["create"] = 0.5
    making = [asyncio.ensure_future(manager.create_sandbox()) for _ in range(20)]
    await until(lambda: engine.most_at_once == 20)
    assert (await (await manager.get_sandbox(ready)).exec("true")).success
    assert await manager.delete_sandbox(ready)
    assert not any(task.done() for task in making)
    await asyncio.gather(*making)


async def test_the_cap_is_exact_however_many_ask_at_once(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager(max_sandboxes=5)
    outcomes = await asyncio.gather(*(manager.create_sandbox() for _ in range(30)), return_exceptions=True)
    assert sum(isinstance(outcome, str) for outcome in outcomes) == 5
    assert all(isinstance(outcome, str | LimitReachedError) for outcome in outcomes)
    assert len(await engine.list()) == 5


async def test_a_failed_creation_gives_its_place_back(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager(max_sandboxes=1)
    engine.failing.add("create")
    for _ in range(3):
        with pytest.raises(SandboxError, match="Failed to create sandbox: the engine is told to fail"):
            await manager.create_sandbox(name="again", key="k")
    engine.heal()
    await manager.create_sandbox(name="again", key="k")


async def test_two_commands_in_one_sandbox_run_at_once(manager: SandboxManager) -> None:
    sandbox = await manager.get_sandbox(await manager.create_sandbox())
    # Each waits for the other: one after the other would never end.
    one, two = await asyncio.gather(
        sandbox.exec("touch one; until test -e two; do sleep 0.01; done", timeout=20),
        sandbox.exec("touch two; until test -e one; do sleep 0.01; done", timeout=20),
    )
    assert one.success
    assert two.success


async def test_exclusive_operations_take_turns(manager: SandboxManager) -> None:
    id = await manager.create_sandbox()
    inside = 0

    async def work() -> None:
        nonlocal inside
        async with manager.sandbox_operation(id, exclusive=True) as sandbox:
            inside += 1
            assert inside == 1
            await sandbox.exec("true")
            inside -= 1

    await asyncio.gather(*(work() for _ in range(5)))


async def test_deleting_ends_what_runs_inside_and_several_deletes_are_one(
    manager: SandboxManager, engine: TroubledEngine
) -> None:
    id = await manager.create_sandbox()
    sandbox = await manager.get_sandbox(id)
    command = await sandbox.start("sleep 1000")
    waiting = asyncio.ensure_future(command.wait())
    await until(lambda: manager.get_stats()["active_operations"] == 1)
    assert await asyncio.gather(*(manager.delete_sandbox(id) for _ in range(5))) == [True] * 5
    assert engine.calls["delete"] == 1
    with pytest.raises(SandboxError):
        await waiting


async def test_a_delete_with_grace_lets_work_end(manager: SandboxManager) -> None:
    id = await manager.create_sandbox()
    sandbox = await manager.get_sandbox(id)
    work = asyncio.ensure_future(sandbox.exec("sleep 0.2; echo done"))
    await until(lambda: manager.get_stats()["active_operations"] == 1)
    await manager.delete_sandbox(id, grace=30)
    assert (await work).stdout == "done\n"


async def test_a_delete_during_creation_ends_it(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager()
    engine.delays["create"] = 0.3
    making = asyncio.ensure_future(manager.create_sandbox(name="half"))
    await until(lambda: engine.calls["create"])
    [record] = await manager.list_sandboxes()
    assert await manager.delete_sandbox(record.id)
    with pytest.raises(SandboxError, match="deleted before it was ready"):
        await making
    assert await engine.list() == []
    assert await manager.list_sandboxes() == []


async def test_unknown_ids_leave_nothing_behind(manager: SandboxManager) -> None:
    for number in range(1000):
        with pytest.raises(SandboxNotFoundError):
            await manager.get_sandbox(f"unknown-{number}")
    wiring = manager._wiring
    assert wiring is not None
    assert len(wiring.context.members) == 0


async def test_a_delete_while_others_connect_looks_like_an_end_to_them_and_not_like_their_own_cancellation(
    manager: SandboxManager,
) -> None:
    for _ in range(10):
        id = await manager.create_sandbox()
        sandbox = await manager.get_sandbox(id)
        await sandbox.let_go()
        work = [asyncio.ensure_future(sandbox.exec("true")) for _ in range(4)]
        await asyncio.sleep(0)
        await manager.delete_sandbox(id)
        for outcome in await asyncio.gather(*work, return_exceptions=True):
            assert isinstance(outcome, SandboxError) or getattr(outcome, "success", False)
