"""A manager as the Manus example uses it: a sandbox for each task, found by it, set up, exported, forgotten."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll import Cause, SandboxNotFoundError, SetupError
from atoll.errors import ConflictError, SpecError
from atoll.manager import LimitReachedError, PoolSettings, SandboxManager
from atoll.model import Capability, SandboxSpec, State
from atoll.sandbox.export import Export
from manager.engines import TroubledEngine
from manager.times import ManualClock
from manager.waiting import until
from needs import not_applicable

Make = Callable[..., SandboxManager]


async def need(engine: TroubledEngine, capability: Capability) -> None:
    if capability not in (await engine.describe()).capabilities:
        not_applicable(f"engine '{engine.name}' cannot do that: {capability}")


async def test_a_sandbox_is_found_by_id_name_and_task_of_its_owner_only(manager: SandboxManager) -> None:
    anns = await manager.create_sandbox(name="box", owner="ann", task_id="task-1")
    bobs = await manager.create_sandbox(name="box", owner="bob", task_id="task-2")
    nobodys = await manager.create_sandbox(name="box", task_id="task-3")
    for text, owner, wanted in (
        *((anns, "ann", anns), ("box", "ann", anns), ("task-1", "ann", anns), (anns, None, anns)),
        *(("box", "bob", bobs), ("task-2", "bob", bobs), ("box", None, nobodys), ("task-3", None, nobodys)),
    ):
        assert (await manager.get_sandbox(text, owner=owner)).id == wanted
    for text, owner in ((anns, "bob"), ("task-1", "bob"), ("task-1", None), ("box", "eve"), ("task-3", "ann")):
        with pytest.raises(SandboxNotFoundError, match=f"Sandbox {text} not found"):
            await manager.get_sandbox(text, owner=owner)
        assert not await manager.delete_sandbox(text, owner=owner or "eve")


async def test_a_name_that_is_anothers_id_leads_to_its_own_sandbox(manager: SandboxManager) -> None:
    anns = await manager.create_sandbox(owner="ann")
    bobs = await manager.create_sandbox(owner="bob", name=anns)
    assert (await manager.get_sandbox(anns, owner="bob")).id == bobs
    assert (await manager.get_sandbox(anns, owner="ann")).id == anns


async def test_a_task_with_several_sandboxes_is_ambiguous(manager: SandboxManager) -> None:
    made = [await manager.create_sandbox(task_id="t") for _ in range(2)]
    with pytest.raises(ConflictError) as refused:
        await manager.get_sandbox("t")
    assert all(id in (refused.value.hint or "") for id in made)
    await manager.delete_sandbox(made[0])
    assert (await manager.get_sandbox("t")).id == made[1]


async def test_a_config_in_the_shape_of_the_example_makes_a_sandbox(
    manager: SandboxManager, engine: TroubledEngine
) -> None:
    await need(engine, Capability.MEMORY)
    id = await manager.create_sandbox({"resources": {"memory": "64m", "cpu": 1}, "timeout": 3600}, task_id="t")
    record = await manager.describe(id)
    assert (record.spec.limits.memory_bytes, record.spec.limits.cpus, record.lifetime_s) == (64 << 20, 1, 3600)
    with pytest.raises(SpecError, match="cpus is given twice"):
        await manager.create_sandbox({"cpu": 1, "resources": {"cpu": 2}, "cpus": 1})
    with pytest.raises(SpecError, match="cannot be the id of a task"):
        await manager.create_sandbox(task_id="a/b")


async def test_setup_runs_before_the_sandbox_is_given_out(manager: SandboxManager, engine: TroubledEngine) -> None:
    await need(engine, Capability.CHECKPOINTS)
    id = await manager.create_sandbox(setup=["echo $STAGE > log"], env={"STAGE": "one"})
    sandbox = await manager.get_sandbox(id)
    assert await sandbox.read_file("log") == "one\n"
    await sandbox.exec("echo more >> log")
    await sandbox.restart()
    assert await sandbox.read_file("log") == "one\n"
    [twin] = await manager.fork_sandbox(id)
    assert await (await manager.get_sandbox(twin)).read_file("log") == "one\n"
    with pytest.raises(SpecError, match="setup is given twice"):
        await manager.create_sandbox({"setup": ["true"]}, setup=["true"])


async def test_a_failed_setup_leaves_nothing(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager()
    with pytest.raises(SetupError) as failed:
        await manager.create_sandbox(setup=["echo why >&2; exit 3"], name="n")
    assert "failed with exit code 3: why" in failed.value.reason
    assert failed.value.output == "why\n"
    assert await engine.list() == []
    assert await manager.list_sandboxes() == []
    await manager.create_sandbox(name="n")


async def test_a_long_setup_keeps_nobody_else_waiting_and_can_be_given_up(
    make_manager: Make, engine: TroubledEngine
) -> None:
    manager = make_manager()
    manager._rules = dataclasses.replace(manager._rules, max_starting=1)
    slow = asyncio.ensure_future(manager.create_sandbox(setup=["sleep 60"], owner="ann"))
    await until(lambda: engine.calls["create"] == 1)
    quick = await manager.create_sandbox(owner="bob")  # the only slot for starting is free
    assert not slow.done()
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    assert [handle.sandbox_id for handle in await engine.list()] == [quick]


async def test_a_spare_is_claimed_only_with_the_same_setup_variables_and_network(make_manager: Make) -> None:
    spec = SandboxSpec.of(setup=["date +%N > stamp; echo $A >> stamp"], env={"A": "1"})
    manager = make_manager(pools=[PoolSettings(spec, size=1, pace_s=0.0)])
    await manager.start()

    def figures() -> dict[str, int]:
        [found] = manager.get_stats()["pools"].values()  # type: ignore[attr-defined]
        return dict(found)

    await until(lambda: figures()["ready"] == 1)
    for config, env in (
        ({"env": {"A": "1"}}, None),
        ({"env": {"A": "1"}, "setup": ["true"]}, None),
        (spec, {"B": "2"}),
        (spec, {"A": "2"}),
    ):
        await manager.create_sandbox(config, env=env)
    assert figures()["hits"] == 0
    spare = next(iter(manager._wiring.pools._pools.values()))._ready[0].id  # type: ignore[union-attr]
    assert await manager.create_sandbox(spec, name="mine") == spare
    assert (await (await manager.get_sandbox("mine")).read_file("stamp")).endswith("\n1\n")


async def test_results_are_exported_then_it_is_destroyed_then_forgotten(
    manager: SandboxManager, engine: TroubledEngine, tmp_path: Path
) -> None:
    await need(engine, Capability.USERS)  # others cannot make /output
    id = await manager.create_sandbox(task_id="t")
    await (await manager.get_sandbox("t")).exec("mkdir -p /output/d; echo 1 > /output/d/a")
    with pytest.raises(SpecError):
        await manager.delete_sandbox("t", export=Export("", source="/output"))
    assert await manager.delete_sandbox("t", export=tmp_path / "results" / "t")
    assert (tmp_path / "results/t/d/a").read_text() == "1\n"
    assert (await manager.describe(id)).state is State.MISSING
    with pytest.raises(SandboxNotFoundError, match="Sandbox t not found"):
        await manager.get_sandbox("t")
    assert not await manager.delete_sandbox("t", export=tmp_path / "again")


async def test_refusals_at_the_cap_are_counted(make_manager: Make) -> None:
    manager = make_manager(max_sandboxes=2, max_per_owner=1)
    await manager.create_sandbox(owner="ann")
    with pytest.raises(LimitReachedError):
        await manager.create_sandbox(owner="ann")
    await manager.create_sandbox()
    for _ in range(2):
        with pytest.raises(LimitReachedError):
            await manager.create_sandbox()
    assert manager.get_stats()["refusals"] == {"owner": 1, "sandboxes": 2}
    text = manager.metrics()
    assert 'atoll_limit_refusals_total{limit="owner"} 1' in text
    assert 'atoll_limit_refusals_total{limit="sandboxes"} 2' in text


async def test_clean_ups_that_fail_are_counted(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager()
    id = await manager.create_sandbox()
    engine.failing = {"delete"}
    with pytest.raises(Exception, match="told to fail to delete"):
        await manager.delete_sandbox(id)
    with pytest.raises(SetupError):
        await manager.create_sandbox(setup=["exit 1"])
    text = manager.metrics()
    assert 'atoll_failures_total{operation="delete"} 1' in text
    assert 'atoll_failures_total{operation="cleanup"} 1' in text
    assert "atoll_sandboxes_not_deleted 2" in text
    engine.heal()
    await until(lambda: "atoll_sandboxes_not_deleted 0" in manager.metrics())


async def test_one_in_error_is_removed_by_the_clean_up_and_missing_with_its_cause(
    make_manager: Make, engine: TroubledEngine, clock: ManualClock
) -> None:
    manager = make_manager(idle_timeout=100, cleanup_interval=10, clock=clock)
    id = await manager.create_sandbox()
    engine.failing = {"inspect"}
    assert (await manager.describe(id)).state is State.ERROR
    clock.advance(60)
    await manager.cleanup_idle()
    assert (await manager.describe(id)).state is State.ERROR  # there is time to look into it
    clock.advance(60)
    await manager.cleanup_idle()
    gone = await manager.describe(id)
    assert (gone.state, gone.cause) == (State.MISSING, Cause.LOST)
    assert "the engine cannot say how it is" in gone.reason
    engine.heal()
    assert await engine.list() == []


async def test_one_that_recovers_from_error_or_would_sleep_is_not_removed(
    make_manager: Make, engine: TroubledEngine, clock: ManualClock
) -> None:
    await need(engine, Capability.PAUSE)
    manager = make_manager(idle_timeout=100, cleanup_interval=10, clock=clock)
    sleeper = await manager.create_sandbox(on_idle="pause")
    engine.failing = {"inspect"}
    assert (await manager.describe(sleeper)).state is State.ERROR
    clock.advance(1000)
    await manager.cleanup_idle()
    assert (await manager.describe(sleeper)).state is State.ERROR
    engine.heal()
    await manager.cleanup_idle()
    assert (await manager.describe(sleeper)).state in (State.RUNNING, State.PAUSED)
