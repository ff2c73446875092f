"""Many sandboxes of a Docker engine in one process, as OpenManus's manager is used."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.openmanus import SandboxManager, SandboxSettings
from docker.private_engine import docker


def containers() -> set[str]:
    return set(docker("ps", "-aq", "--filter", "label=atoll.sandbox_id").split())


async def test_the_calls_of_a_program_work(config: SandboxSettings, tmp_path: Path) -> None:
    before = containers()
    async with SandboxManager(max_sandboxes=3, idle_timeout=60, cleanup_interval=60, state_dir=tmp_path) as manager:
        assert await manager.ensure_image(config.image)
        assert not await manager.ensure_image("127.0.0.1:1/no/such:image")
        ids = await asyncio.gather(*(manager.create_sandbox(config) for _ in range(3)))
        with pytest.raises(RuntimeError, match=r"Maximum number of sandboxes \(3\) reached"):
            await manager.create_sandbox(config)
        sandbox = await manager.get_sandbox(ids[0])
        assert await sandbox.run_command("echo 42", 20) == "42"
        async with manager.sandbox_operation(ids[1]) as same:
            await same.write_file("file", "text")
            assert await same.read_file("file") == "text"
        assert len(containers() - before) == 3
        await manager.delete_sandbox(ids[0])
        with pytest.raises(KeyError, match="not found"):
            await manager.get_sandbox(ids[0])
        assert manager.get_stats()["total_sandboxes"] == 2
    assert containers() == before


async def test_a_creation_that_fails_holds_nobody_up(config: SandboxSettings, tmp_path: Path) -> None:
    missing = config.model_copy(update={"image": "127.0.0.1:1/no/such:image"})
    async with SandboxManager(max_sandboxes=1, state_dir=tmp_path) as manager, asyncio.timeout(40):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="image"):
                await manager.create_sandbox(missing)
        assert (
            await (await manager.get_sandbox(await manager.create_sandbox(config))).run_command("echo on", 20) == "on"
        )


async def test_orphans_of_a_manager_that_died_are_found_again(config: SandboxSettings, tmp_path: Path) -> None:
    first = SandboxManager(state_dir=tmp_path, at_exit="keep")
    name = await first.create_sandbox(config)
    await (await first.get_sandbox(name)).write_file("kept", "yes")
    await first.cleanup(keep=True)
    async with SandboxManager(state_dir=tmp_path) as second:
        assert await (await second.get_sandbox(name)).read_file("kept") == "yes"
