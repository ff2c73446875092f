"""Snapshots without a sandbox: listed, exported, imported and deleted by the class."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll import AsyncSandbox, Sandbox, SnapshotNotFoundError
from atoll.engines.linux.engine import LinuxEngine
from atoll.settings import Settings


async def test_snapshots_are_a_matter_of_the_class(native: LinuxEngine, tmp_path: Path) -> None:
    async with AsyncSandbox(engine=native) as sandbox:
        await sandbox.write_file("f", "kept")
        made = await sandbox.snapshot("kept")
    assert await AsyncSandbox.snapshots(engine=native) == [made]
    await AsyncSandbox.export_snapshot("kept", tmp_path / "file", engine=native)
    await AsyncSandbox.delete_snapshot("kept", engine=native)
    assert await AsyncSandbox.snapshots(engine=native) == []
    with pytest.raises(SnapshotNotFoundError):
        await AsyncSandbox.create(engine=native, image="snapshot:kept")
    taken = await AsyncSandbox.import_snapshot(tmp_path / "file", "again", engine=native)
    assert taken.name == "again"
    async with AsyncSandbox(engine=native, image="snapshot:again") as sandbox:
        assert await sandbox.read_file("f") == "kept"


def test_snapshots_without_await(native: LinuxEngine, settings: Settings) -> None:
    with Sandbox(engine="native", settings=settings) as sandbox:
        sandbox.snapshot("plain")
    assert [each.name for each in Sandbox.snapshots(settings=settings)] == ["plain"]
    Sandbox.delete_snapshot("plain", settings=settings)
    assert Sandbox.snapshots(settings=settings) == []


async def test_undo_is_known_to_whoever_attaches(native: LinuxEngine) -> None:
    sandbox = await AsyncSandbox.create(engine=native, undo=True)
    await sandbox.detach()
    found = await AsyncSandbox.attach(sandbox.id, engine=native)
    async with found:
        await found.exec("echo 1 > f")
        await found.undo()
        assert not await found.exists("f")


async def test_a_fork_does_not_take_the_name(native: LinuxEngine) -> None:
    async with AsyncSandbox(engine=native, name="origin", labels={"run": "1"}) as sandbox:
        (fork,) = await sandbox.fork()
        async with fork:
            listed = {each.id: each for each in await AsyncSandbox.list(engine=native)}
            assert listed[sandbox.id].name == "origin"
            assert listed[fork.id].name is None
            assert listed[fork.id].labels == {"run": "1"}
            attached = await AsyncSandbox.attach("origin", engine=native)
            assert attached.id == sandbox.id
            await attached.detach()
