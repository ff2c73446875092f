"""Many sandboxes of a Docker engine in one process, as OpenManus's manager is used."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.openmanus import AsyncDockerizedTerminal, DockerSandbox, SandboxManager, SandboxSettings
from docker.private_engine import DEBIAN, docker


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


@pytest.fixture
def default_image() -> Iterator[str]:
    """As if it had been pulled."""
    image = SandboxSettings().image
    docker("tag", DEBIAN, image)
    yield image
    docker("rmi", image)


async def test_without_a_config_and_with_the_words_of_openmanus(tmp_path: Path, default_image: str) -> None:
    async with SandboxManager(max_sandboxes=1, state_dir=tmp_path) as manager:
        name = await manager.create_sandbox()
        with pytest.raises(RuntimeError) as full:
            await manager.create_sandbox()
        assert str(full.value) == "Maximum number of sandboxes (1) reached"
        with pytest.raises(KeyError) as unknown:
            await manager.get_sandbox("nonexistent-id")
        assert str(unknown.value) == "Sandbox nonexistent-id not found"
        manager.max_sandboxes = 2
        with pytest.raises(RuntimeError) as no_image:
            await manager.create_sandbox(SandboxSettings(image="127.0.0.1:1/no/such:image"))
        assert str(no_image.value) == "Failed to ensure Docker image: 127.0.0.1:1/no/such:image"
        sandbox = await manager.get_sandbox(name)
        assert isinstance(sandbox, DockerSandbox)
        assert sandbox.config.image == default_image
        assert sandbox.terminal is not None
        assert await sandbox.terminal.run_command("pwd") == "/workspace"
        assert sandbox.container is not None
        assert docker("inspect", "--format", "{{.Id}} {{.Name}}", sandbox.container.id).split() == [
            sandbox.container.id,
            f"/{sandbox.container.name}",
        ]
        assert (await sandbox.client.container(sandbox.sandbox.id))["Id"] == sandbox.container.id
        async with AsyncDockerizedTerminal(sandbox.container.id) as terminal:
            assert (await terminal.client.container(name))["Id"] == sandbox.container.id


async def test_its_inner_state_is_the_real_one(config: SandboxSettings, tmp_path: Path) -> None:
    manager = SandboxManager(max_sandboxes=3, idle_timeout=60, cleanup_interval=60, state_dir=tmp_path)
    sandboxes, last_used, locks = manager._sandboxes, manager._last_used, manager._locks
    assert (len(sandboxes), len(last_used), list(locks)) == (0, 0, [])
    name = await manager.create_sandbox(config)
    assert list(sandboxes) == list(last_used) == list(locks) == [name]
    assert sandboxes[name] is await manager.get_sandbox(name)
    assert manager._cleanup_task is not None
    before = last_used[name]
    assert 0 <= asyncio.get_running_loop().time() - before < 60
    await sandboxes[name].run_command("true")
    assert last_used[name] > before
    async with manager.sandbox_operation(name, exclusive=True) as same:
        assert same is sandboxes[name]
        assert set(manager._active_operations) == {name}
        assert locks[name].locked()
        assert manager.get_stats()["active_operations"] == 1
    assert not manager._active_operations
    with pytest.raises(KeyError, match="not found"):
        _ = sandboxes["other"]
    await manager.delete_sandbox(name)
    assert name not in sandboxes
    assert name not in last_used
    second = await manager.create_sandbox(config)
    await manager.cleanup()
    assert not manager._sandboxes
    assert not manager._last_used
    assert second not in sandboxes


async def test_idle_ones_end_by_a_timeout_that_was_changed(config: SandboxSettings, tmp_path: Path) -> None:
    async with SandboxManager(idle_timeout=3600, cleanup_interval=3600, state_dir=tmp_path) as manager:
        name = await manager.create_sandbox(config)
        await manager._cleanup_idle_sandboxes()
        assert name in manager._sandboxes
        manager.idle_timeout = 0.1
        assert manager.get_stats()["idle_timeout"] == 0.1
        async with asyncio.timeout(30):
            while name in manager._sandboxes:
                await manager._cleanup_idle_sandboxes()
        for wrong in (0, -1):
            with pytest.raises(ValueError, match="idle_timeout"):
                manager.idle_timeout = wrong
        with pytest.raises(ValueError, match="max_sandboxes"):
            manager.max_sandboxes = -1


async def test_settings_of_a_sandbox_that_was_found_again(config: SandboxSettings, tmp_path: Path) -> None:
    first = SandboxManager(state_dir=tmp_path)
    wanted = config.model_copy(update={"cpu_limit": 0.5, "timeout": 17, "work_dir": "/project"})
    name = await first.create_sandbox(wanted)
    await first.cleanup(keep=True)
    async with SandboxManager(state_dir=tmp_path) as second:
        found = second._sandboxes[name].config
        assert (found.image, found.cpu_limit, found.timeout) == (wanted.image, 0.5, 17)
        assert (found.work_dir, found.network_enabled) == ("/project", False)
