"""A manager that was killed before an upgrade: the next one finds its sandboxes, names and history."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from atoll import PoolSettings, SandboxManager, SandboxSpec, State
from atoll.settings import Settings
from upgrade.conftest import Installation
from upgrade.version_before import OldTree

NAMED: dict[str, Any] = {
    "name": "builder",
    "owner": "ann",
    "labels": {"team": "red"},
    "env": {"COLOUR": "coral"},
    "lifetime": 3600,
    "timeout": 50,
    "key": "only-once",
    "task_id": "task-7",
    "idle_timeout": 1800,
    "on_idle": "pause",
    "services": [8080],
}

OTHER: dict[str, Any] = {"owner": "bob", "engine": "process", "labels": {"team": "blue"}, "key": "only-once"}


def manager() -> SandboxManager:
    return SandboxManager(engine="native", at_exit="keep", pools=[PoolSettings(SandboxSpec(env={"POOLED": "yes"}), 1)])


def test_a_manager_goes_on_with_what_the_version_before_had(
    old: OldTree, installation: Installation, need_engine: Callable[[str, Settings], None]
) -> None:
    for engine in ("native", "process"):
        need_engine(engine, installation.settings)
    asyncio.run(recovered(old, installation))


async def recovered(old: OldTree, installation: Installation) -> None:
    facts = old.run("managed.py", {"named": NAMED, "other": OTHER}, installation.environment)
    old.remove()
    ids = facts["ids"]
    everything = set(installation.listed())
    async with manager() as ours:
        found = await ours.start()
        assert set(found.adopted) == everything
        assert (found.undone, found.deleted, found.lost, found.failed) == ([], [], [], [])
        assert found.journal_put_aside is None
        records = {record.id: record for record in await ours.list_sandboxes()}
        assert records.keys() == set(ids.values())
        assert {id for id, record in records.items() if record.owner == "ann"} == {ids["named"], ids["fork"]}
        await is_as_it_was(ours, facts)
        await goes_on(ours, facts)
        assert {row.id for row in (await ours.search_ended(owner="ann"))} == {facts["deleted"]}
        assert set(installation.listed()) == everything, "the spare of the pool is one of them"
    # The engine alone knows whose each is, too.
    for path in (installation.settings.data_dir / "manager").glob("manager.db*"):
        path.unlink()
    async with manager() as ours:
        assert set((await ours.start()).adopted) >= set(ids.values())
        record = await ours.find_sandbox("builder", owner="ann")
        assert record is not None
        assert record.id == ids["named"]
        assert record.labels == {"team": "red", "task_id": "task-7"}


async def is_as_it_was(ours: SandboxManager, facts: dict[str, Any]) -> None:
    named = facts["ids"]["named"]
    assert await ours.create_sandbox(**NAMED) == named, "the same request with the same key"
    assert await ours.create_sandbox(**OTHER) == facts["ids"]["other"]
    record = await ours.describe(named)
    assert record == await ours.find_sandbox("builder", owner="ann")
    assert record.expires_at == facts["expires_at"]
    assert (record.timeout_s, record.idle_timeout_s, record.on_idle, record.services) == (50, 1800, "pause", (8080,))
    assert (record.watched, record.command_end) == (facts["command"], None)
    assert await ours.latest_event() >= facts["event"]
    history = [event.after for event in await ours.events(sandbox_id=named)]
    assert State.RUNNING in history


async def goes_on(ours: SandboxManager, facts: dict[str, Any]) -> None:
    ids = facts["ids"]
    sandbox = await ours.get_sandbox("builder", owner="ann")
    assert sandbox.id == ids["named"]
    assert await sandbox.run_command("pwd; echo $colour; greet you") == "/tmp\nred\nhello you", "it is the same shell"
    assert (await sandbox.exec("cat notes.txt; echo $COLOUR")).stdout == "keptcoral\n"
    await sandbox.write_file("go", "")
    while (end := (await ours.describe(sandbox.id)).command_end) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    assert (end.exit_code, end.output) == (5, "bye\n")
    assert await (await ours.get_sandbox("twin", owner="ann")).read_file("notes.txt") == "kept"
    assert (await (await ours.get_sandbox(ids["other"])).exec("echo works")).stdout == "works\n"
    paused = await ours.describe(ids["paused"])
    assert (paused.state, paused.paused_by) == (State.PAUSED, "user")
    await ours.resume_sandbox(ids["paused"])
    assert (await (await ours.get_sandbox(ids["paused"])).exec("echo awake")).stdout == "awake\n"
