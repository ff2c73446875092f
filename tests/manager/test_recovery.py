"""A manager that starts where another one stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.engines.host.process_ref import ProcessRef
from atoll.errors import SandboxGoneError
from atoll.manager import PoolSettings, Record, SandboxManager, StateError, StateInUseError
from atoll.manager.journal_tables import checksum
from atoll.manager.record import Operation
from atoll.model import Cause, SandboxSpec, State
from atoll.settings import Settings
from manager.engines import TroubledEngine
from manager.times import ManualClock
from manager.waiting import until

Make = Callable[..., SandboxManager]


def rewrite(folder: Path, id: str, **update: object) -> None:
    """Change what was written down about a sandbox, as if the manager had died at another moment."""
    with sqlite3.connect(folder / "state" / "manager.db") as database:
        [(body,)] = database.execute("SELECT body FROM sandboxes WHERE id = ?", (id,)).fetchall()
        body = Record.model_validate_json(body).model_copy(update=update).model_dump_json()
        database.execute("UPDATE sandboxes SET body = ?, crc = ? WHERE id = ?", (body, checksum(id, body), id))
    database.close()


async def left_running(make: Make, **request: object) -> str:
    first = make()
    id = await first.create_sandbox(**request)  # type: ignore[arg-type]
    assert (await first.cleanup(keep=True)).kept == [id]
    return id


async def test_living_sandboxes_are_adopted_with_their_commands_and_output(make_manager: Make) -> None:
    first = make_manager()
    id = await first.create_sandbox(name="kept", owner="ann", labels={"a": "b"}, env={"X": "1"}, key="k", lifetime=1000)
    sandbox = await first.get_sandbox(id)
    command = await sandbox.start("echo before; until test -e go; do sleep 0.01; done; echo after")
    await sandbox.write_file("note", "still here")
    await first.cleanup(keep=True)
    second = make_manager()
    assert (await second.start()).adopted == [id]
    [record] = await second.list_sandboxes(name="kept", owner="ann", labels={"a": "b"})
    assert (record.id, record.state, record.lifetime_s) == (id, State.RUNNING, 1000)
    assert (
        await second.create_sandbox(key="k", owner="ann", name="kept", labels={"a": "b"}, env={"X": "1"}, lifetime=1000)
        == id
    )
    again = await second.get_sandbox(id)
    assert await again.read_file("note") == "still here"
    assert await again.commands() == [command.id]
    await again.write_file("go", "")
    assert (await (await again.command(command.id)).wait()).stdout == "before\nafter\n"


async def test_variables_given_at_a_claim_survive(make_manager: Make) -> None:
    first = make_manager(pools=[PoolSettings(SandboxSpec(), size=1)])
    await first.start()
    await until(lambda: "'ready': 1" in str(first.get_stats()["pools"]))
    id = await first.create_sandbox(env={"X": "claimed"})
    await first.cleanup(keep=True)
    second = make_manager()
    assert (await (await second.get_sandbox(id)).exec("echo $X")).stdout == "claimed\n"


async def test_a_half_made_creation_is_undone(make_manager: Make, folder: Path, engine: TroubledEngine) -> None:
    id = await left_running(make_manager)
    rewrite(folder, id, state=State.STARTING, act=Operation.CREATE)
    second = make_manager()
    assert (await second.start()).undone == [id]
    assert await second.list_sandboxes() == []
    assert await engine.list() == []
    assert (await second.describe(id)).cause is Cause.LOST


async def test_a_half_made_deletion_is_finished_with_its_cause(
    make_manager: Make, folder: Path, engine: TroubledEngine
) -> None:
    id = await left_running(make_manager)
    rewrite(folder, id, act=Operation.DELETE, cause=Cause.POLICY, reason="idle")
    second = make_manager()
    assert (await second.start()).deleted == [id]
    assert await engine.list() == []
    gone = await second.describe(id)
    assert (gone.cause, gone.reason) == (Cause.POLICY, "idle")


async def test_one_that_is_deleted_while_it_is_claimed_is_known_to_be_on_its_way_out(
    make_manager: Make, folder: Path, engine: TroubledEngine
) -> None:
    """Else a manager that dies in that moment would leave a sandbox that is said to run."""
    manager = make_manager(pools=[PoolSettings(SandboxSpec(), size=1)])
    await manager.start()
    await until(lambda: '"ready": 1' in json.dumps(manager.get_stats()["pools"]))
    engine.hanging.add("delete")
    database = sqlite3.connect(folder / "state" / "manager.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")  # so that the claim cannot be written down yet
    claiming = asyncio.create_task(manager.create_sandbox())
    await until(lambda: manager.get_stats()["total_sandboxes"] == 1)
    listed = await manager.list_sandboxes()
    deleting = asyncio.create_task(manager.delete_sandbox(listed[0].id))
    await asyncio.sleep(0.1)
    database.execute("COMMIT")
    await until(lambda: engine.calls["delete"] == 1)
    [body] = database.execute("SELECT body FROM sandboxes WHERE id = ?", (listed[0].id,)).fetchone()
    database.close()
    assert json.loads(body)["act"] is not None
    engine.heal()
    with pytest.raises(SandboxGoneError):
        await claiming
    assert await deleting


async def test_one_that_is_lost_is_marked_with_a_cause(make_manager: Make, engine: TroubledEngine) -> None:
    id = await left_running(make_manager)
    [handle] = await engine.list()
    await engine.delete(handle)
    second = make_manager()
    assert (await second.start()).lost == [id]
    assert (await second.describe(id)).cause is Cause.LOST
    with pytest.raises(KeyError):
        await second.get_sandbox(id)


async def test_one_that_died_meanwhile_is_known_to_be_dead(make_manager: Make, engine: TroubledEngine) -> None:
    id = await left_running(make_manager)
    await engine.kill_agent(id)
    second = make_manager()
    await second.start()
    record = await second.describe(id)
    assert record.state is State.STOPPED
    assert record.cause in (Cause.KILLED, Cause.LOST)  # not every engine can tell


async def test_after_a_restart_of_the_machine_nothing_is_mistaken_for_something_else(
    make_manager: Make, folder: Path, settings: Settings, engine: TroubledEngine
) -> None:
    """The process numbers of the old boot belong to others now."""
    id = await left_running(make_manager)
    agent, path = ProcessRef.of(engine.agent_pid(id)), engine.records().home(id) / "record.json"
    assert agent is not None
    stranger = await asyncio.create_subprocess_exec("sleep", "1000")
    now = ProcessRef.of(stranger.pid)
    assert now is not None
    changes = {"boot_id": "an older boot", "init": {"pid": now.pid, "started": now.started}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    rewrite(folder, id, boot_id="an older boot")
    second = make_manager()
    await second.start()
    record = await second.describe(id)
    assert (record.state, record.cause, record.reason) == (State.STOPPED, Cause.HOST, "the machine was restarted")
    await second.delete_sandbox(id)
    assert now.is_alive()
    stranger.kill()
    await stranger.wait()
    if agent.is_alive():  # of no boot that the engine knows
        os.kill(agent.pid, signal.SIGKILL)
    await until(lambda: not agent.is_alive())


async def test_what_is_gone_after_a_restart_of_the_machine_says_so(
    make_manager: Make, folder: Path, engine: TroubledEngine
) -> None:
    id = await left_running(make_manager)
    [handle] = await engine.list()
    await engine.delete(handle)
    rewrite(folder, id, boot_id="an older boot")
    second = make_manager()
    await second.start()
    assert (await second.describe(id)).cause is Cause.HOST


async def test_a_lifetime_goes_on_over_a_restart_and_a_jumping_clock_does_not_lengthen_it(
    make_manager: Make, clock: ManualClock
) -> None:
    first = make_manager(clock=clock)
    id = await first.create_sandbox(lifetime=100)
    await first.cleanup(keep=True)
    clock.advance(60)
    clock.jump = -(10**6)
    second = make_manager(clock=clock)
    await second.start()
    [record] = await second.list_sandboxes()
    assert record.expires_now == clock.now() + 40
    await second.cleanup(keep=True)
    clock.boot_id = "second boot"
    third = make_manager(clock=clock)
    await third.start()
    [record] = await third.list_sandboxes()
    assert record.expires_now == clock.now() + 100  # the wall says more, which cannot be
    clock.advance(101)
    await third.cleanup_idle()
    assert (await third.wait_until(id, State.MISSING)).cause is Cause.TIMEOUT


async def test_spares_go_back_to_their_pool_or_go_away_with_it(
    make_manager: Make, engine: TroubledEngine, folder: Path
) -> None:
    pool = PoolSettings(SandboxSpec(), size=2)
    script = f"""
import asyncio, os
from pathlib import Path
from atoll.manager import *
from atoll.model import SandboxSpec
from atoll.settings import Settings
async def main():
    settings = Settings(Path({str(engine.settings.data_dir)!r}), Path({str(engine.settings.run_dir)!r}))
    state = Path({str(folder / "state")!r})
    manager = SandboxManager(engine="{engine.name}", settings=settings, state_dir=state,
        pools=[PoolSettings(SandboxSpec(), size=2)])
    await manager.start()
    while "'ready': 2" not in str(manager.get_stats()): await asyncio.sleep(0.01)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await process.wait() == -9
    spares = {handle.sandbox_id for handle in await engine.list()}
    assert len(spares) == 2
    second = make_manager(pools=[pool])
    await second.start()
    assert await second.create_sandbox() in spares
    await second.cleanup(keep=True)
    third = make_manager()
    await third.start()
    await until(lambda: _count(engine) == 1)
    assert len(await third.list_sandboxes()) == 1


def _count(engine: TroubledEngine) -> int:
    return len(engine.records().ids())


async def test_a_second_manager_on_one_state_directory_is_refused(
    make_manager: Make, folder: Path, settings: Settings
) -> None:
    first = make_manager()
    id = await first.create_sandbox()
    with pytest.raises(StateInUseError, match=f"process {os.getpid()}"):
        await make_manager().start()
    script = f"""
import asyncio
from pathlib import Path
from atoll.manager import SandboxManager, StateInUseError
from atoll.settings import Settings
async def main():
    settings = Settings(Path({str(settings.data_dir)!r}), Path({str(settings.run_dir)!r}))
    try:
        await SandboxManager(settings=settings, state_dir=Path({str(folder / "state")!r})).start()
    except StateInUseError:
        raise SystemExit(7)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await process.wait() == 7
    assert (await (await first.get_sandbox(id)).exec("true")).success


async def test_two_managers_on_two_state_directories_leave_each_other_alone(make_manager: Make, folder: Path) -> None:
    one, two = make_manager(), make_manager(state_dir=folder / "other")
    mine, theirs = await one.create_sandbox(), await two.create_sandbox()
    await one.cleanup(keep=True)
    again = make_manager()
    assert (await again.start()).adopted == [mine]
    await again.cleanup()
    assert (await (await two.get_sandbox(theirs)).exec("true")).success


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "zeroed":
        data = bytearray(len(data))
    elif how == "garbage":
        data = bytearray(os.urandom(len(data)))
    elif how == "header":
        data[:20] = b"not a database at al"
    elif how == "empty":
        data = bytearray()
    elif how == "page":
        data[4096:8192] = os.urandom(4096)
    path.write_bytes(data)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


@pytest.mark.parametrize("how", ["zeroed", "garbage", "header", "empty", "page"])
async def test_a_damaged_journal_is_rebuilt_from_what_the_engine_has(
    make_manager: Make, folder: Path, how: str
) -> None:
    id = await left_running(make_manager, name="kept", owner="ann", labels={"a": "b"})
    damage(folder / "state" / "manager.db", how)
    second = make_manager()
    recovered = await second.start()
    assert recovered.adopted == [id]
    if how != "empty":
        assert recovered.journal_put_aside is not None
        assert Path(recovered.journal_put_aside).exists()
    [record] = await second.list_sandboxes(name="kept", owner="ann", labels={"a": "b"})
    assert record.state is State.RUNNING
    assert (await (await second.get_sandbox(id)).exec("true")).success


async def test_any_flipped_byte_is_survived_and_never_deletes_a_living_sandbox(
    make_manager: Make, folder: Path, engine: TroubledEngine
) -> None:
    id = await left_running(make_manager, name="kept")
    path = folder / "state" / "manager.db"
    whole = path.read_bytes()
    for position in range(0, len(whole), max(1, len(whole) // 40)):
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        manager = make_manager()
        try:
            await manager.start()
        except StateError:
            continue
        finally:
            await manager.cleanup(keep=True)
        assert [handle.sandbox_id for handle in await engine.list()] == [id]
    for file in (folder / "state").glob("manager.db*"):
        file.unlink()
    last = make_manager()
    assert (await last.start()).adopted == [id]


async def test_a_journal_of_a_newer_version_is_refused(make_manager: Make, folder: Path) -> None:
    await make_manager().start()
    newer = make_manager(state_dir=folder / "newer")
    (folder / "newer").mkdir(mode=0o700)
    with sqlite3.connect(folder / "newer" / "manager.db") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StateError, match="newer version"):
        await newer.start()


async def test_recovering_many_does_not_wait_for_a_broken_one(make_manager: Make, engine: TroubledEngine) -> None:
    first = make_manager()
    ids = await asyncio.gather(*(first.create_sandbox() for _ in range(20)))
    await first.cleanup(keep=True)
    engine.delays["inspect"] = 0.2
    second = make_manager()
    assert sorted((await second.start()).adopted) == sorted(ids)
    assert engine.calls["inspect"] >= 20
