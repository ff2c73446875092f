from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from atoll.errors import SandboxError, SandboxNotFoundError
from atoll.manager import ConflictError, LimitReachedError, SandboxManager
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
    parts = manager._parts
    assert parts is not None
    assert len(parts.core.members) == 0


@pytest.mark.parametrize("seed", range(3))
async def test_random_operations_by_many_clients_agree_with_a_model(
    make_manager: Make, engine: TroubledEngine, seed: int
) -> None:
    """16 clients, 64 names: never two of a name, never more than the cap, and in the end exactly what the model has."""
    cap, clients, steps = 12, 16, 20
    manager = make_manager(max_sandboxes=cap)
    dice = random.Random(seed)
    live: dict[str, str] = {}
    created: set[str] = set()
    ever: set[str] = set()
    deleted: set[str] = set()

    async def client(number: int) -> None:
        for _ in range(steps):
            # Each client has names of its own besides those that all share.
            name = f"n{dice.randrange(60)}" if dice.random() < 0.7 else f"own-{number % 4}"
            try:
                match dice.choice(["create", "create", "get", "delete", "use", "list", "cancel"]):
                    case "create":
                        id = await manager.create_sandbox(name=name)
                        assert id not in created
                        created.add(id)
                        ever.add(id)
                        live[name] = id
                    case "get":
                        live[name] = id = await manager.get_or_create(name)
                        ever.add(id)
                    case "delete" if name in live:
                        id = live.pop(name)
                        await manager.delete_sandbox(id)
                        deleted.add(id)
                        assert id not in {record.id for record in await manager.list_sandboxes()}
                    case "use" if name in live:
                        await (await manager.get_sandbox(live[name])).exec(["true"])
                    case "list":
                        records = await manager.list_sandboxes()
                        names = [record.name for record in records if record.name is not None]
                        assert len(set(names)) == len(names)
                        assert len(records) <= cap
                        assert len(await engine.list()) <= cap
                    case "cancel":
                        task = asyncio.ensure_future(manager.create_sandbox())
                        await asyncio.sleep(dice.random() * 0.03)
                        task.cancel()
                        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
                        if isinstance(outcome, str):
                            await manager.delete_sandbox(outcome)
            except (LimitReachedError, ConflictError, SandboxError):
                continue

    await asyncio.gather(*(client(number) for number in range(clients)))
    records = await manager.list_sandboxes()
    held = {record.id for record in records}
    assert held == {handle.sandbox_id for handle in await engine.list()}
    assert held == ever - deleted
    assert len(held) == len(records)
    for record in records:
        assert (await (await manager.get_sandbox(record.id)).exec(["true"])).success


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
