from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from atoll.engines.contract import Resizable
from atoll.errors import EngineError, SandboxGoneError, SpecError, UnsupportedError
from atoll.manager import LimitReachedError, PoolSettings, SandboxManager
from atoll.manager.pool import PoolSize
from atoll.model import Cause, Limits, SandboxSpec, Volume
from manager.engines import TroubledEngine
from manager.times import ManualClock
from manager.waiting import until
from needs import not_applicable

Make = Callable[..., SandboxManager]


def figures(manager: SandboxManager) -> dict[str, Any]:
    [found] = manager.get_stats()["pools"].values()  # type: ignore[attr-defined]
    assert isinstance(found, dict)
    return found


async def filled(make: Make, size: int = 2, **options: Any) -> SandboxManager:
    settings = {name: options.pop(name) for name in ("max_size", "pace_s", "window_s", "max_age_s") if name in options}
    pool = PoolSettings(options.pop("spec", SandboxSpec()), size=size, **{"pace_s": 0.0, **settings})
    manager = make(pools=[pool], **options)
    await manager.start()
    await until(lambda: figures(manager)["ready"] == size)
    return manager


async def test_a_claim_makes_nothing_and_the_pool_is_filled_again(make_manager: Make, engine: TroubledEngine) -> None:
    manager = await filled(make_manager)
    engine.delays["create"] = 0.2
    spares = {handle.sandbox_id for handle in await engine.list()}
    id = await manager.create_sandbox()
    assert id in spares
    assert (await (await manager.get_sandbox(id)).exec("true")).success
    await until(lambda: figures(manager)["ready"] == 2)
    found = figures(manager)
    assert (found["hits"], found["misses"], found["refills"]) == (1, 0, 3)


async def test_spares_are_nobodys_and_not_listed(make_manager: Make, engine: TroubledEngine) -> None:
    manager = await filled(make_manager)
    assert await manager.list_sandboxes() == []
    assert manager.get_stats()["total_sandboxes"] == 0
    spare = (await engine.list())[0].sandbox_id
    with pytest.raises(KeyError):
        await manager.get_sandbox(spare)
    assert not await manager.delete_sandbox(spare)


async def test_settings_are_applied_when_it_is_claimed(make_manager: Make) -> None:
    manager = await filled(make_manager, spec=SandboxSpec(env={"BASE": "1"}))
    id = await manager.create_sandbox(
        {"env": {"BASE": "1"}}, name="mine", owner="ann", labels={"a": "b"}, env={"EXTRA": "two words"}, lifetime=100
    )
    assert figures(manager)["hits"] == 1
    [record] = await manager.list_sandboxes(name="mine", owner="ann", labels={"a": "b"})
    assert (record.id, record.lifetime_s) == (id, 100)
    sandbox = await manager.get_sandbox(id)
    assert (await sandbox.exec('echo "$BASE $EXTRA"')).stdout == "1 two words\n"
    assert (await sandbox.exec('echo "$EXTRA"', env={"EXTRA": "other"})).stdout == "other\n"
    assert await sandbox.run_command('echo "$EXTRA"') == "two words"
    command = await sandbox.start('echo "$EXTRA"')
    assert (await command.wait()).stdout == "two words\n"
    terminal = await sandbox.open_terminal(["sh", "-c", 'echo "$EXTRA"'])
    assert b"two words" in b"".join([piece async for piece in terminal])


async def test_limits_are_applied_when_it_is_claimed_where_the_engine_can(
    make_manager: Make, engine: TroubledEngine
) -> None:
    manager = await filled(make_manager)
    if not isinstance(engine, Resizable):
        with pytest.raises(UnsupportedError):
            await manager.create_sandbox({"limits": {"pids": 16}})
        assert figures(manager)["hits"] == 0
        return
    id = await manager.create_sandbox({"limits": {"pids": 16, "memory_bytes": 64 << 20, "cpus": 0.5}}, lifetime=100)
    assert figures(manager)["hits"] == 1
    sandbox = await manager.get_sandbox(id)
    assert (await sandbox.exec(["tail", "/dev/zero"], timeout=30)).cause is Cause.OUT_OF_MEMORY
    bomb = "i=0; while [ $i -lt 40 ]; do sleep 60 & i=$((i+1)); done; wait"
    # dash gives up at once; bash would try again for 15 seconds
    assert (await sandbox.exec(["dash", "-c", bomb], timeout=20)).cause is Cause.PIDS
    [handle] = [handle for handle in await engine.list() if handle.sandbox_id == id]
    assert (handle.spec.limits.pids, handle.spec.limits.cpus) == (16, 0.5)
    assert (await manager.describe(id)).spec.limits == handle.spec.limits


async def test_limits_that_cannot_be_set_fail_the_creation_and_leave_nothing(
    make_manager: Make, engine: TroubledEngine
) -> None:
    if not isinstance(engine, Resizable):
        not_applicable("this engine sets no limits later")
    manager = await filled(make_manager, size=1)
    [spare] = await engine.list()
    engine.failing.add("set_limits")
    with pytest.raises(EngineError, match="Failed to create sandbox: the engine is told to fail to set_limits"):
        await manager.create_sandbox({"limits": {"pids": 16}}, name="mine")
    assert await manager.list_sandboxes() == []
    assert spare.sandbox_id not in {handle.sandbox_id for handle in await engine.list()}


@pytest.mark.parametrize(
    "config",
    [
        {"hostname": "other"},
        {"env": {}},
        {"env": {"BASE": "2"}},
        {"limits": Limits(open_files=64)},
        {"work_dir": "/other"},
    ],
)
async def test_what_cannot_be_changed_afterwards_is_never_taken_from_a_pool(
    make_manager: Make, config: dict[str, object]
) -> None:
    manager = await filled(make_manager, size=1, spec=SandboxSpec(env={"BASE": "1"}))
    await manager.create_sandbox(config)
    assert figures(manager)["hits"] == 0


async def test_a_dead_one_is_never_handed_out(make_manager: Make, engine: TroubledEngine) -> None:
    manager = await filled(make_manager, size=3)
    dead = {handle.sandbox_id for handle in (await engine.list())[:2]}
    for id in dead:
        await engine.kill_agent(id)
    claimed = [await manager.create_sandbox() for _ in range(3)]
    assert not dead & set(claimed)
    for id in claimed:
        assert (await (await manager.get_sandbox(id)).exec("true")).success
    await until(lambda: figures(manager)["discarded"] == 2)
    await until(lambda: figures(manager)["ready"] == 3)


async def test_the_sweep_replaces_those_that_died_or_waited_too_long(
    make_manager: Make, engine: TroubledEngine, clock: ManualClock
) -> None:
    manager = await filled(make_manager, clock=clock, max_age_s=500, idle_timeout=100)
    first = {handle.sandbox_id for handle in await engine.list()}
    clock.advance(400)
    await manager.cleanup_idle()
    assert {handle.sandbox_id for handle in await engine.list()} == first
    await engine.kill_agent(sorted(first)[0])

    async def swept() -> set[str]:
        await manager.cleanup_idle()
        return {handle.sandbox_id for handle in await engine.list()}

    async with asyncio.timeout(20):
        while sorted(first)[0] in await swept():
            pass
    clock.advance(200)
    async with asyncio.timeout(20):
        while first & await swept():
            pass
    await until(lambda: figures(manager)["ready"] == 2)


async def test_one_that_was_used_never_comes_back(make_manager: Make) -> None:
    manager = await filled(make_manager)
    seen: set[str] = set()
    for number in range(8):
        id = await manager.create_sandbox()
        assert id not in seen
        seen.add(id)
        sandbox = await manager.get_sandbox(id)
        assert await sandbox.list_files() == []
        await sandbox.write_file("mine", str(number))
        await manager.delete_sandbox(id)


async def test_two_from_one_pool_share_nothing(make_manager: Make) -> None:
    manager = await filled(make_manager)
    one = await manager.get_sandbox(await manager.create_sandbox())
    two = await manager.get_sandbox(await manager.create_sandbox())
    await one.write_file("/tmp/secret", "x")
    look = (
        "cat /tmp/secret /etc/machine-id /etc/ssh/ssh_host* 2>/dev/null; head -c 16 /dev/urandom | od -An -tx1; id -u"
    )
    first, second = (await one.exec(look)).stdout, (await two.exec(look)).stdout
    assert "x" in first
    assert "x" not in second
    assert first.splitlines()[-2] != second.splitlines()[-2]


async def test_claims_at_once_never_get_the_same_one(make_manager: Make) -> None:
    manager = await filled(make_manager, size=4)
    claimed = await asyncio.gather(*(manager.create_sandbox() for _ in range(10)))
    assert len(set(claimed)) == 10


async def test_a_pool_backs_off_while_the_engine_fails_and_goes_on_afterwards(
    make_manager: Make, engine: TroubledEngine, clock: ManualClock
) -> None:
    engine.failing.add("create")
    manager = make_manager(pools=[PoolSettings(SandboxSpec(), size=1, parallel=1)], clock=clock, cleanup_interval=10**6)
    await manager.start()
    waits = []
    for tries in range(1, 9):
        await until(lambda: figures(manager)["failures"] == tries)  # noqa: B023
        await until(lambda: any(wait < 10**5 for wait in clock.sleeps()))
        waits.append(clock.sleeps()[0])
        clock.advance(waits[-1])
    assert all(0.375 * 2**n <= wait <= 0.625 * 2**n for n, wait in enumerate(waits[:7]))
    assert waits[7] <= 75
    engine.heal()
    async with asyncio.timeout(30):
        while figures(manager)["ready"] < 1:
            clock.advance(100)
            await asyncio.sleep(0.01)
    # Meanwhile nobody was refused for the pool's sake.
    await manager.create_sandbox()


async def test_spares_count_against_the_cap_but_make_way(make_manager: Make, engine: TroubledEngine) -> None:
    manager = await filled(make_manager, size=3, max_sandboxes=3)
    await manager.create_sandbox({"hostname": "other"})
    assert len(await engine.list()) <= 3
    await manager.create_sandbox({"hostname": "other"})
    await manager.create_sandbox({"hostname": "other"})
    assert len(await engine.list()) == 3
    with pytest.raises(LimitReachedError):
        await manager.create_sandbox()
    [record, *_] = await manager.list_sandboxes()
    await manager.delete_sandbox(record.id)
    await until(lambda: figures(manager)["ready"] == 1)


async def test_spares_that_are_just_being_made_make_way_too(make_manager: Make, engine: TroubledEngine) -> None:
    engine.delays["create"] = 0.2
    manager = make_manager(pools=[PoolSettings(SandboxSpec(), size=2, pace_s=0.0)], max_sandboxes=2)
    await manager.start()
    await until(lambda: engine.calls["create"] == 2)
    ids = await asyncio.gather(*(manager.create_sandbox({"hostname": "other"}) for _ in range(2)))
    assert {handle.sandbox_id for handle in await engine.list()} == set(ids)
    assert figures(manager)["failures"] == 0
    await manager.delete_sandbox(ids[0])
    await until(lambda: figures(manager)["ready"] == 1)


async def test_who_uses_one_that_is_being_deleted_hears_that_it_has_ended(
    make_manager: Make, engine: TroubledEngine
) -> None:
    manager = make_manager()
    id = await manager.create_sandbox()
    sandbox = await manager.get_sandbox(id)
    uses = [asyncio.create_task(sandbox.append_file("f", "x" * 100_000)) for _ in range(50)]
    await asyncio.sleep(0)
    await manager.delete_sandbox(id)
    for error in await asyncio.gather(*uses, return_exceptions=True):
        assert error is None or isinstance(error, SandboxGoneError), repr(error)


@pytest.mark.parametrize(
    "spec",
    [SandboxSpec(labels={"a": "b"}), SandboxSpec(volumes=(Volume(host="/tmp", path="/mnt"),))],
)
def test_a_pool_cannot_share_what_belongs_to_one(spec: SandboxSpec) -> None:
    with pytest.raises(SpecError):
        PoolSettings(spec)


def test_the_size_follows_the_demand() -> None:
    size = PoolSize(2, 16, 60, now=0)
    assert size.target(0) == 2
    for expected in (4, 8, 16, 16):
        size.asked(1, hit=False)
        assert size.target(1) == expected
    for second in range(2, 20):
        size.asked(second, hit=True)
    assert size.target(61) == 16  # more than half of it was asked for
    assert size.target(121) == 8
    assert size.target(181) == 4
    assert size.target(10**9) == 2


async def test_a_pool_grows_when_somebody_had_to_wait_and_shrinks_again(
    make_manager: Make, clock: ManualClock, engine: TroubledEngine
) -> None:
    manager = await filled(make_manager, size=1, max_size=4, window_s=60, clock=clock)
    await asyncio.gather(*(manager.create_sandbox() for _ in range(4)))
    assert figures(manager)["misses"] == 3
    await until(lambda: figures(manager)["ready"] == 4)
    clock.advance(1000)
    await manager.cleanup_idle()
    assert figures(manager)["target"] == 1
    await until(lambda: figures(manager)["ready"] == 1)
