"""A manager's idle sandboxes sleep on the disk, on the engine that can do that, and go on when they are used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.manager import PausedBy, SandboxManager
from atoll.model import State
from atoll.settings import Settings
from checkpoints.conftest import emptied, engine_named


@pytest.fixture
async def gvisor(settings: Settings) -> AsyncIterator[LinuxEngine]:
    engine = engine_named("runsc", settings)
    yield engine
    await emptied(engine)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("steps", [{"on_idle": "disk"}, {"on_idle": "pause", "disk_timeout": 1}])
async def test_an_idle_sandbox_moves_to_the_disk_and_comes_back(
    gvisor: LinuxEngine, settings: Settings, tmp_path: Path, steps: dict[str, object]
) -> None:
    options = {"engine": gvisor, "settings": settings, "state_dir": tmp_path / "state", "at_exit": "delete", **steps}
    async with SandboxManager(idle_timeout=6, **options) as manager:  # type: ignore[arg-type]
        id = await manager.create_sandbox()
        sandbox = await manager.get_sandbox(id)
        assert await sandbox.run_command("x=kept; echo $x") == "kept"
        async with asyncio.timeout(80):
            while (await manager.describe(id)).state is not State.PAUSED or gvisor.layout.group(id).pids():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        record = await manager.describe(id)
        assert record.paused_by is PausedBy.IDLE
        assert await sandbox.run_command("echo $x") == "kept"
