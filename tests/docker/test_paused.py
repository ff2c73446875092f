"""Paused containers: every call says so, and a manager lets idle ones sleep."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll import AsyncSandbox, SandboxPausedError
from atoll.engines.docker.engine import DockerEngine
from atoll.manager import PausedBy, SandboxManager
from atoll.model import State
from atoll.settings import Settings
from docker.private_engine import DEBIAN
from sandbox.calling import CALLS, expect


async def test_every_call_of_a_paused_container_says_so_at_once(engine: DockerEngine, settings: Settings) -> None:
    async with AsyncSandbox(engine=engine, image=DEBIAN, settings=settings) as sandbox:
        await sandbox.write_file("kept", "x")
        other = await AsyncSandbox.attach(sandbox.id, engine=engine, settings=settings)
        await sandbox.pause()
        for asked in (sandbox, other):
            await asyncio.gather(*(expect(name, asked, SandboxPausedError, 15) for name in CALLS))
        await sandbox.resume()
        assert [info.path for info in await sandbox.list_files()] == ["kept"]
        await other.detach()


async def test_a_busy_container_is_kept_and_an_idle_one_sleeps_until_it_is_used(
    engine: DockerEngine, settings: Settings, tmp_path: Path
) -> None:
    async with SandboxManager(
        idle_timeout=3, on_idle="pause", engine=engine, settings=settings, state_dir=tmp_path / "state"
    ) as manager:
        busy, idle = [await manager.create_sandbox({"image": DEBIAN}) for _ in range(2)]
        await (await (await manager.get_sandbox(busy)).start("while :; do :; done")).detach()
        await manager.wait_until(idle, State.PAUSED, timeout=40)
        assert (await manager.describe(idle)).paused_by is PausedBy.IDLE
        assert (await manager.describe(busy)).state is State.RUNNING
        assert (await (await manager.get_sandbox(idle)).exec("echo on")).stdout == "on\n"


pytestmark = pytest.mark.timeout(180)
