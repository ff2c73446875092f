"""What goes wrong has a defined outcome."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from atoll.errors import EngineError, SandboxError, SandboxTimeoutError
from atoll.manager import Rules, SandboxManager, StateError
from atoll.model import Cause, State
from atoll.settings import Settings
from manager.engines import TroubledEngine
from manager.times import ManualClock
from manager.waiting import until
from needs import missing, needs

Make = Callable[..., SandboxManager]


async def test_an_engine_that_cannot_list_refuses_the_start_and_holds_nothing(
    make_manager: Make, engine: TroubledEngine
) -> None:
    engine.failing.add("list")
    with pytest.raises(EngineError):
        await make_manager().start()
    engine.heal()
    await make_manager().start()


async def test_a_delete_that_fails_is_reported_still_counted_and_tried_again(
    make_manager: Make, engine: TroubledEngine, clock: ManualClock
) -> None:
    manager = make_manager(max_sandboxes=1, clock=clock, cleanup_interval=10**6)
    id = await manager.create_sandbox()
    engine.failing.add("delete")
    with pytest.raises(EngineError, match="told to fail to delete"):
        await manager.delete_sandbox(id)
    [record] = await manager.list_sandboxes()
    assert (record.id, record.state, record.act) == (id, State.ERROR, "delete")
    with pytest.raises(RuntimeError, match="Maximum number"):
        await manager.create_sandbox()
    with pytest.raises(KeyError):
        await manager.get_sandbox(id)
    await until(lambda: any(left <= 1 for left in clock.sleeps()))  # it will be tried again without anybody asking
    clock.advance(1)
    await until(lambda: engine.calls["delete"] == 2)
    await until(lambda: any(1 < left <= 2 for left in clock.sleeps()))
    clock.advance(1)
    before = engine.calls["delete"]
    await manager.cleanup_idle()
    assert engine.calls["delete"] == before  # the second wait is longer than the first
    engine.heal()
    clock.advance(10)
    await manager.cleanup_idle()
    gone = await manager.describe(id)
    assert (gone.cause, gone.reason) == (Cause.USER, "it was deleted")


async def test_a_sandbox_that_does_not_die_is_reported_in_time_and_delays_nobody(
    make_manager: Make, engine: TroubledEngine
) -> None:
    manager = make_manager(rules=Rules(delete_s=0.05))
    id = await manager.create_sandbox()
    engine.hanging.add("delete")
    with pytest.raises(SandboxTimeoutError, match=r"longer than 0\.05 s to delete"):
        await manager.delete_sandbox(id)
    assert (await (await manager.get_sandbox(await manager.create_sandbox())).exec("true")).success
    report = await manager.cleanup(timeout=0.3)
    assert id in report.failed
    engine.heal()
    recovered = await make_manager().start()
    assert id in recovered.deleted
    assert await engine.list() == []


async def test_a_creation_that_hangs_ends_at_its_deadline(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager(rules=Rules(create_s=2.0))
    engine.delays["create"] = 60
    with pytest.raises(SandboxTimeoutError, match="Failed to create sandbox: it took longer than 2 s"):
        await manager.create_sandbox()
    engine.heal()
    assert await manager.list_sandboxes() == []
    await manager.create_sandbox()


async def test_a_creation_that_fails_and_cannot_be_undone_is_remembered(
    make_manager: Make, engine: TroubledEngine
) -> None:
    manager = make_manager()
    engine.failing |= {"create", "delete"}
    with pytest.raises(EngineError, match="fail to create"):
        await manager.create_sandbox()
    [record] = await manager.list_sandboxes()
    assert record.state is State.ERROR
    engine.heal()
    await manager.wait_until(record.id, State.MISSING, timeout=30)  # tried again without anybody asking
    assert await manager.list_sandboxes() == []


async def test_an_engine_that_is_down_for_a_while_makes_errors_that_heal(
    make_manager: Make, engine: TroubledEngine
) -> None:
    manager = make_manager()
    id = await manager.create_sandbox()
    engine.failing.add("inspect")
    record = await manager.describe(id)
    assert record.state is State.ERROR
    assert "told to fail to inspect" in record.reason
    engine.heal()
    assert (await (await manager.get_sandbox(id)).exec("true")).success
    assert (await manager.describe(id)).state is State.RUNNING


async def test_one_that_somebody_else_removed_is_gone_with_a_cause(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager()
    id = await manager.create_sandbox()
    [handle] = await engine.list()
    await engine.delete(handle)
    assert (await manager.describe(id)).state is State.MISSING
    assert (await manager.describe(id)).cause is Cause.LOST
    assert await manager.list_sandboxes() == []


async def test_when_nothing_can_be_written_creating_fails_and_deleting_works(
    make_manager: Make, engine: TroubledEngine, folder: Path
) -> None:
    manager = make_manager()
    id = await manager.create_sandbox()
    # Somebody else holds the write lock of the database, which is as bad as a full disk, and can be ended.
    other = sqlite3.connect(folder / "state" / "manager.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StateError, match="cannot be written"):
        await manager.create_sandbox()
    assert await manager.delete_sandbox(id)
    assert await engine.list() == []
    other.execute("ROLLBACK")
    other.close()
    await manager.create_sandbox()
    stats = manager.get_stats()
    assert stats["failures"]["write"] >= 1  # type: ignore[index]


def fill(path: Path) -> None:
    """Write until there is no room left."""
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)


@needs("root")
async def test_a_full_disk_refuses_creations_and_nothing_else(
    make_manager: Make, engine: TroubledEngine, folder: Path
) -> None:
    state = folder / "small"
    state.mkdir(mode=0o700)
    mount = await asyncio.create_subprocess_exec("mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(state))
    if await mount.wait() != 0:
        missing("this machine does not let us mount")
    try:
        manager = make_manager(state_dir=state)
        id = await manager.create_sandbox()
        filler = state / "filler"
        fill(filler)
        with pytest.raises(StateError):
            await asyncio.gather(*(manager.create_sandbox() for _ in range(20)))
        await until(lambda: manager.get_stats()["states"]["STARTING"] == 0)  # type: ignore[index]
        assert await manager.delete_sandbox(id)
        filler.unlink()
        await manager.create_sandbox()
        await manager.cleanup()
    finally:
        await (await asyncio.create_subprocess_exec("umount", "-l", str(state))).wait()


async def test_a_state_directory_that_cannot_be_written_is_refused(make_manager: Make, folder: Path) -> None:
    (folder / "file").write_text("not a directory")
    with pytest.raises(StateError, match="cannot be used"):
        await make_manager(state_dir=folder / "file").start()


async def test_shutting_down_during_creations_leaves_nothing(make_manager: Make, engine: TroubledEngine) -> None:
    manager = make_manager()
    await manager.start()
    engine.delays["create"] = 0.05
    making = [asyncio.ensure_future(manager.create_sandbox()) for _ in range(6)]
    await until(lambda: engine.calls["create"] == 6)
    await manager.cleanup()
    outcomes = await asyncio.gather(*making, return_exceptions=True)
    assert all(isinstance(outcome, SandboxError) for outcome in outcomes)
    assert await engine.list() == []


async def test_draining_lets_what_is_under_way_end(make_manager: Make) -> None:
    manager = make_manager()
    sandbox = await manager.get_sandbox(await manager.create_sandbox())
    work = asyncio.ensure_future(sandbox.exec("sleep 0.2; echo done"))
    await until(lambda: manager.get_stats()["active_operations"] == 1)
    await manager.cleanup(drain=30)
    assert (await work).stdout == "done\n"


async def test_a_listener_that_fails_harms_nobody(make_manager: Make) -> None:
    def fail(event: object) -> None:
        raise RuntimeError("a bad listener")

    manager = make_manager(on_event=fail)
    await manager.delete_sandbox(await manager.create_sandbox())


@pytest.mark.parametrize("keep", [False, True])
async def test_sigterm_drains_and_ends_in_order(
    make_manager: Make, engine: TroubledEngine, settings: Settings, folder: Path, keep: bool
) -> None:
    script = f"""
import asyncio
from pathlib import Path
from atoll.manager import SandboxManager
from atoll.settings import Settings
async def main():
    settings = Settings(Path({str(settings.data_dir)!r}), Path({str(settings.run_dir)!r}))
    manager = SandboxManager(engine="{engine.name}", settings=settings, state_dir=Path({str(folder / "state")!r}),
        at_exit={"keep" if keep else "delete"!r})
    sandbox = await manager.get_sandbox(await manager.create_sandbox())
    manager.stop_on_signals(drain=20)
    work = asyncio.ensure_future(sandbox.exec("until test -e stop; do sleep 0.01; done; echo drained"))
    async with asyncio.timeout(20):
        while manager.get_stats()["active_operations"] != 1: await asyncio.sleep(0.01)
    await sandbox.write_file("started", "")
    print("ready", flush=True)
    async with asyncio.timeout(20):
        while not manager.get_stats()["is_shutting_down"]: await asyncio.sleep(0.01)
    await sandbox.access.guest.files.write("stop", b"")
    report = await manager.closed()
    print((await work).stdout, len(report.deleted), len(report.kept), report.failed, report.stuck)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    process.terminate()
    rest = (await process.stdout.read()).decode()
    assert await process.wait() == 0
    assert rest.split() == ["drained", "0" if keep else "1", "1" if keep else "0", "{}", "[]"]
    assert len(await engine.list()) == int(keep)
    await make_manager().start()
