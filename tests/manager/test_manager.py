"""What the manager's users see."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll import (
    AsyncSandbox,
    Cause,
    SandboxGoneError,
    SandboxNotFoundError,
    SandboxSpec,
    SandboxTimeoutError,
    SpecError,
)
from atoll.manager import ConflictError, Event, LimitReachedError, ManagerClosedError, SandboxManager
from atoll.model import State
from manager.engines import TroubledEngine
from manager.times import ManualClock
from manager.waiting import until

Make = Callable[..., SandboxManager]


async def test_the_calls_of_the_seed_work(make_manager: Make) -> None:
    async with make_manager(max_sandboxes=2, idle_timeout=60, cleanup_interval=30) as manager:
        manager.start_cleanup_task()
        assert await manager.ensure_image("host")
        assert not await manager.ensure_image("no-such-image")
        first = await manager.create_sandbox()
        sandbox = await manager.get_sandbox(first)
        assert (await sandbox.run_command("echo hello")) == "hello"
        async with manager.sandbox_operation(first) as same:
            assert same is sandbox
            assert manager.get_stats()["active_operations"] == 1
        await manager.create_sandbox({"env": {"A": "b"}})
        with pytest.raises(RuntimeError, match=r"Maximum number of sandboxes \(2\) reached"):
            await manager.create_sandbox()
        stats = manager.get_stats()
        assert stats["total_sandboxes"] == 2
        assert (stats["max_sandboxes"], stats["idle_timeout"], stats["cleanup_interval"]) == (2, 60, 30)
        assert stats["is_shutting_down"] is False
        await manager.delete_sandbox(first)
        await manager.delete_sandbox("never-existed")
        with pytest.raises(KeyError, match=f"Sandbox {first} not found"):
            await manager.get_sandbox(first)
        await manager.cleanup()
        assert manager.get_stats()["is_shutting_down"] is True
        assert manager.get_stats()["total_sandboxes"] == 0


async def test_volumes_are_bound(manager: SandboxManager, folder: Path) -> None:
    shared = folder / "shared"
    shared.mkdir(mode=0o755)
    (shared / "note").write_text("from the host")
    sandbox = await manager.get_sandbox(await manager.create_sandbox(None, {str(shared): "/mnt/shared:ro"}))
    assert await sandbox.read_file("/mnt/shared/note") == "from the host"


async def test_a_name_stands_for_one_sandbox_of_its_owner(manager: SandboxManager) -> None:
    first = await manager.create_sandbox(name="build", owner="ann")
    with pytest.raises(ConflictError, match="already a sandbox named 'build'"):
        await manager.create_sandbox(name="build", owner="ann")
    assert await manager.create_sandbox(name="build", owner="bob") != first
    assert await manager.get_or_create("build", owner="ann") == first
    await manager.delete_sandbox(first)
    assert await manager.get_or_create("build", owner="ann") != first


async def test_many_who_get_or_create_one_name_at_once_get_one_sandbox(
    manager: SandboxManager, engine: TroubledEngine
) -> None:
    found = await asyncio.gather(*(manager.get_or_create("one") for _ in range(20)))
    assert len(set(found)) == 1
    assert engine.calls["create"] == 1


async def test_asking_again_with_the_same_key_gives_the_same_sandbox(
    manager: SandboxManager, engine: TroubledEngine
) -> None:
    found = await asyncio.gather(*(manager.create_sandbox(key="request-1") for _ in range(10)))
    assert await manager.create_sandbox(key="request-1") == found[0]
    assert len(set(found)) == 1
    assert engine.calls["create"] == 1
    with pytest.raises(ConflictError, match="used for another request"):
        await manager.create_sandbox({"hostname": "other"}, key="request-1")
    assert await manager.create_sandbox(key="request-1", owner="somebody") != found[0]


async def test_a_list_can_be_narrowed(manager: SandboxManager) -> None:
    red = await manager.create_sandbox(labels={"colour": "red", "size": "big"}, owner="ann")
    blue = await manager.create_sandbox(labels={"colour": "blue"}, owner="ann", name="sea")
    assert [record.id for record in await manager.list_sandboxes()] == [blue, red]
    assert [record.id for record in await manager.list_sandboxes(labels={"colour": "red"})] == [red]
    assert [record.id for record in await manager.list_sandboxes(owner="ann", name="sea")] == [blue]
    assert await manager.list_sandboxes(state=State.PAUSED) == []
    await manager.delete_sandbox(red)
    [gone] = await manager.list_sandboxes(ended=True)
    assert (gone.id, gone.cause, gone.labels["size"]) == (red, Cause.USER, "big")


@pytest.mark.parametrize(
    "request_",
    [
        {"name": "no/slash"},
        {"name": ""},
        {"owner": ""},
        {"key": "k" * 600},
        {"labels": {"atoll.manager": "forged"}},
        {"labels": {"": "x"}},
        {"env": {"A=B": "c"}},
        {"lifetime": 0},
        {"config": {"no_such_field": 1}},
        {"volume_bindings": {"./relative": "/x"}},
    ],
)
async def test_nonsense_is_refused_before_anything_is_made(
    manager: SandboxManager, engine: TroubledEngine, request_: dict[str, object]
) -> None:
    with pytest.raises(SpecError):
        await manager.create_sandbox(**request_)  # type: ignore[arg-type]
    assert engine.calls["create"] == 0


@pytest.mark.parametrize(
    "options", [{"max_sandboxes": -1}, {"idle_timeout": 0}, {"at_cap": "explode"}, {"max_lifetime": -3}]
)
def test_nonsensical_rules_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SandboxManager(**options)  # type: ignore[arg-type]


async def test_an_owner_has_a_share(make_manager: Make) -> None:
    manager = make_manager(max_per_owner=2)
    mine = [await manager.create_sandbox(owner="ann") for _ in range(2)]
    with pytest.raises(LimitReachedError, match=r"\(2\) of owner 'ann'"):
        await manager.create_sandbox(owner="ann")
    await manager.create_sandbox(owner="bob")
    await manager.create_sandbox()
    await manager.delete_sandbox(mine[0])
    await manager.create_sandbox(owner="ann")


async def test_no_room_at_all_is_a_limit_like_any_other(make_manager: Make) -> None:
    with pytest.raises(LimitReachedError, match=r"\(0\) reached"):
        await make_manager(max_sandboxes=0).create_sandbox()


async def test_a_sandbox_ends_when_its_lifetime_is_over_unless_it_is_extended(
    make_manager: Make, clock: ManualClock
) -> None:
    manager = make_manager(clock=clock, max_lifetime=1000)
    short = await manager.create_sandbox(lifetime=50)
    longer = await manager.create_sandbox(lifetime=50)
    forever = await manager.create_sandbox()
    record = await manager.extend_lifetime(longer, 500)
    assert record.expires_at == clock.wall() + 500
    assert (await manager.extend_lifetime(forever, 10**9)).lifetime_s == 1000
    await until(lambda: 50 in clock.sleeps())
    clock.advance(50)
    gone = await manager.wait_until(short, State.MISSING)
    assert (gone.cause, gone.reason) == (Cause.TIMEOUT, "its lifetime of 50 s is over")
    assert {record.id for record in await manager.list_sandboxes()} == {longer, forever}


async def test_wait_until_sees_what_happens_outside(manager: SandboxManager, engine: TroubledEngine) -> None:
    id = await manager.create_sandbox()
    await manager.wait_until(id, State.RUNNING)
    with pytest.raises(SandboxTimeoutError, match="is RUNNING, not PAUSED"):
        await manager.wait_until(id, State.PAUSED, timeout=0.01)
    await engine.kill_agent(id)
    record = await manager.wait_until(id, State.STOPPED)
    assert record.cause in (Cause.KILLED, Cause.LOST)  # not every engine can tell
    with pytest.raises(SandboxGoneError, match="has ended"):
        await (await manager.get_sandbox(id)).exec("true")
    assert (await manager.describe(id)).state is State.STOPPED
    with pytest.raises(SandboxNotFoundError):
        await manager.wait_until("unknown", State.RUNNING)


async def test_whoever_asks_for_one_that_ended_learns_why(manager: SandboxManager) -> None:
    id = await manager.create_sandbox()
    sandbox = await manager.get_sandbox(id)
    await sandbox.cleanup()
    with pytest.raises(SandboxGoneError, match="it was deleted"):
        await sandbox.exec("true")
    with pytest.raises(SandboxNotFoundError) as caught:
        await manager.get_sandbox(id)
    assert "user" in (caught.value.hint or "")
    assert (await manager.describe(id)).ended_at is not None


async def test_every_change_writes_an_event_with_its_cause(make_manager: Make) -> None:
    heard: list[Event] = []
    manager = make_manager(on_event=heard.append)
    id = await manager.create_sandbox()
    await manager.delete_sandbox(id)
    changes = [
        (event.before, event.after) for event in await manager.events(sandbox_id=id) if event.before != event.after
    ]
    assert changes == [
        (State.MISSING, State.STARTING),
        (State.STARTING, State.RUNNING),
        (State.RUNNING, State.MISSING),
    ]
    assert (await manager.events(sandbox_id=id))[-1].cause is Cause.USER
    assert len(heard) == len(await manager.events())
    assert await manager.events(after=(await manager.events())[-1].number) == []


async def test_after_shutdown_everything_is_refused(make_manager: Make) -> None:
    manager = make_manager()
    id = await manager.create_sandbox()
    sandbox = await manager.get_sandbox(id)
    report = await manager.cleanup()
    assert report.deleted == [id]
    for attempt in (
        manager.create_sandbox(),
        manager.get_sandbox(id),
        manager.delete_sandbox(id),
        manager.list_sandboxes(),
    ):
        with pytest.raises(ManagerClosedError):
            await attempt
    with pytest.raises((ManagerClosedError, SandboxGoneError)):
        await sandbox.exec("true")
    assert (await manager.cleanup()).deleted == [id]


async def test_figures_count_what_happened(make_manager: Make) -> None:
    manager = make_manager()
    id = await manager.create_sandbox()
    await (await manager.get_sandbox(id)).exec("true")
    assert (await manager.resources())[id].pids is not None
    stats = manager.get_stats()
    assert stats["states"]["RUNNING"] == 1  # type: ignore[index]
    await manager.delete_sandbox(id)
    text = manager.metrics()
    assert 'atoll_sandbox_deaths_total{cause="user"} 1' in text
    assert "atoll_create_seconds_count 1" in text
    assert 'atoll_exec_seconds_bucket{le="+Inf"} 1' in text


async def test_a_manager_belongs_to_one_event_loop(manager: SandboxManager) -> None:
    def elsewhere() -> None:
        asyncio.run(manager.list_sandboxes())

    with pytest.raises(Exception, match="another event loop"):
        await asyncio.to_thread(elsewhere)


async def test_sandboxes_made_without_a_manager_are_none_of_its_business(
    manager: SandboxManager, engine: TroubledEngine, make_manager: Make
) -> None:
    async with AsyncSandbox(SandboxSpec(), engine=engine) as other:
        await manager.cleanup()
        again = make_manager()
        assert (await again.start()).adopted == []
        assert await again.list_sandboxes() == []
        assert not await again.delete_sandbox(other.id)
        assert (await other.exec("true")).success


async def test_idle_sandboxes_need_no_descriptors(manager: SandboxManager) -> None:
    wiring = manager._wiring
    assert wiring is not None
    wiring.factory.connections.limit = 4
    await manager.create_sandbox()
    before = len(os.listdir("/proc/self/fd"))
    ids = [await manager.create_sandbox() for _ in range(12)]
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 5)
    sandbox = await manager.get_sandbox(ids[0])
    command = await sandbox.start("until test -e go; do sleep 0.01; done; echo went")
    waiting = asyncio.ensure_future(command.wait())
    for id in ids:
        assert (await (await manager.get_sandbox(id)).exec("echo $((6*7))")).stdout == "42\n"
    assert wiring.factory.connections._open.keys() >= {ids[0]}, "the connection of one in use was given up"
    await sandbox.write_file("go", "")
    assert (await waiting).stdout == "went\n"
    for id in ids:
        await manager.delete_sandbox(id)
    assert not wiring.factory.connections._open.keys() & set(ids), "what is gone is remembered"
