"""Many sandboxes, one after another and at the same time: none fails, and nothing of them stays."""

from __future__ import annotations

import asyncio
import os

import pytest

from atoll import AsyncSandbox
from atoll.engines.linux.native_engine import NativeEngine
from atoll.settings import Settings
from native.launchers import left_behind

AT_ONCE = 16


@pytest.mark.parametrize(
    "cycles",
    [
        pytest.param(160, marks=pytest.mark.timeout(120)),
        pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
async def test_create_exec_delete(engine: NativeEngine, settings: Settings, cycles: int) -> None:
    numbers = iter(range(cycles))
    seen: set[str] = set()

    async def work() -> None:
        for number in numbers:
            async with AsyncSandbox(engine=engine, settings=settings, pids=64) as sandbox:
                result = await sandbox.exec(f"echo {number} $ATOLL_SANDBOX_ID; echo {number} >file; cat file")
                assert result.stdout == f"{number} {sandbox.id}\n{number}\n"
                seen.add(result.stdout)

    async with AsyncSandbox(engine=engine, settings=settings):
        pass  # what is made once
    opened = len(os.listdir("/proc/self/fd"))
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    assert len(seen) == cycles
    await engine.aclose()
    assert left_behind(engine) == []
    assert len(os.listdir("/proc/self/fd")) <= opened
