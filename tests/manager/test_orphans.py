"""What nobody owns goes by itself, and nothing that somebody owns does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from atoll.engines.host.cgroups.group_limits import CgroupLimits
from atoll.errors import SandboxError, SandboxGoneError
from atoll.manager import SandboxManager
from atoll.model import State
from leftovers import leftovers
from manager.engines import TroubledEngine
from manager.waiting import until

ENGINES = ("native", "oci")
Make = Callable[..., SandboxManager]


async def test_what_killed_calls_left_is_removed_at_the_start(engine: Any, make_manager: Make) -> None:
    places = engine.layout
    places.ids.claim("orphan")
    places.layers.create_layer("orphan", None)
    places.group("orphan").create(CgroupLimits())
    assert len(leftovers(engine.settings)) > 2
    manager = make_manager()
    await manager.start()
    await until(lambda: leftovers(engine.settings) == [])
    assert await manager.list_sandboxes() == []


async def test_a_sandbox_that_outlives_its_end_is_removed(engine: TroubledEngine, make_manager: Make) -> None:
    """Somebody makes it once more after we were told that it is gone. It is not ours again, now or after a restart."""
    for restarts in (False, True):
        manager = make_manager()
        kept = await manager.create_sandbox()
        id = await manager.create_sandbox()
        spec = (await manager.get_sandbox(id)).spec
        await manager.delete_sandbox(id)
        await engine.create(id, spec)
        if restarts:
            await manager.cleanup(keep=True)
            was_there = engine.records().exists(id)  # unless the manager's own look came just then
            manager = make_manager()
            assert (id in (await manager.start()).deleted) == was_there
        else:
            await (await manager._open()).orphans.collect()  # or the manager's own first look was just under way
        await until(lambda: not engine.records().exists(id))  # noqa: B023
        assert [handle.sandbox_id for handle in await engine.list()] == [kept]
        assert [record.id for record in await manager.list_sandboxes()] == [kept]
        await manager.cleanup()


async def test_what_is_not_written_down_is_left_for_the_next_start(engine: TroubledEngine, make_manager: Make) -> None:
    manager = make_manager()
    id = await manager.create_sandbox()
    spec = (await manager.get_sandbox(id)).spec
    await engine.create("stranger", spec)
    wiring = await manager._open()
    assert await wiring.orphans.collect() == []
    assert {handle.sandbox_id for handle in await engine.list()} == {id, "stranger"}
    await manager.cleanup(keep=True)
    manager = make_manager()
    assert set((await manager.start()).adopted) == {id, "stranger"}


@pytest.mark.parametrize("what", ["restart", "checkpoint", "pause", "fork"])
async def test_a_deletion_wins_over_what_is_done_meanwhile(
    engine: TroubledEngine, make_manager: Make, what: str
) -> None:
    manager = make_manager()
    for number in range(3):
        id = await manager.create_sandbox()
        sandbox = await manager.get_sandbox(id)
        work = manager.pause_sandbox(id) if what == "pause" else getattr(sandbox, what)()
        doing = asyncio.ensure_future(work)
        await asyncio.sleep(0.01 * number)
        async with asyncio.timeout(30):
            assert await manager.delete_sandbox(id)
            told = (await asyncio.gather(doing, return_exceptions=True))[0]
        assert not isinstance(told, BaseException) or isinstance(told, SandboxGoneError), repr(told)
        for fork in await manager.list_sandboxes():
            await manager.delete_sandbox(fork.id)
        with pytest.raises(SandboxError):
            await manager.get_sandbox(id)
        assert leftovers(engine.settings) == []


async def test_a_look_at_one_that_starts_again_changes_nothing(engine: TroubledEngine, make_manager: Make) -> None:
    """Whoever looks at a sandbox while it is restarted must not take it for broken."""
    events: list[State] = []
    manager = make_manager(on_event=lambda event: events.append(event.after))
    id = await manager.create_sandbox()
    sandbox = await manager.get_sandbox(id)
    wiring = await manager._open()
    member = wiring.context.members.get(id)
    restarting = asyncio.ensure_future(sandbox.restart())
    looks = 0
    while not restarting.done():
        await wiring.health.look(member)
        looks += 1
    await restarting
    assert looks > 3
    assert State.ERROR not in events
    assert (await sandbox.exec("echo ok", timeout=20)).stdout == "ok\n"
    await manager.delete_sandbox(id)
