"""Many sandboxes, for long: nothing grows."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.errors import SandboxError
from atoll.manager import SandboxManager
from atoll.model import State
from manager.engines import TroubledEngine

Make = Callable[..., SandboxManager]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def cycles(manager: SandboxManager, count: int, parallel: int = 8) -> int:
    """Create, exec, write, read, delete; how many of them failed."""
    left, failed = count, 0

    async def worker() -> None:
        nonlocal left, failed
        while left > 0:
            left -= 1
            try:
                id = await manager.create_sandbox()
                sandbox = await manager.get_sandbox(id)
                assert (await sandbox.exec(["echo", "hello"])).stdout == "hello\n"
                await sandbox.write_file("file", "content")
                assert await sandbox.read_file("file") == "content"
                await manager.delete_sandbox(id)
            except (SandboxError, OSError, AssertionError):
                failed += 1

    await asyncio.gather(*(worker() for _ in range(parallel)))
    return failed


async def soaked(manager: SandboxManager, count: int) -> None:
    assert await cycles(manager, 100) == 0  # everything that is made once is there
    gc.collect()
    memory, open_files = resident_bytes(), descriptors()
    failed = await cycles(manager, count)
    gc.collect()
    assert failed <= count * 0.0001
    assert resident_bytes() - memory <= 20 << 20
    assert descriptors() - open_files <= 10


async def test_some_hundred_cycles_leave_nothing_in_the_manager(make_manager: Make, engine: TroubledEngine) -> None:
    await soaked(make_manager(), 200)
    assert await engine.list() == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_ten_thousand_cycles_leave_nothing_in_the_manager(make_manager: Make, engine: TroubledEngine) -> None:
    await soaked(make_manager(), int(os.environ.get("ATOLL_TEST_CYCLES", "10000")))
    assert await engine.list() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_hundred_sandboxes_are_recovered_within_ten_seconds(make_manager: Make) -> None:
    first = make_manager(max_sandboxes=100)
    ids = await asyncio.gather(*(first.create_sandbox() for _ in range(100)))
    await first.cleanup(keep=True)
    second = make_manager(max_sandboxes=100)
    started = time.monotonic()
    recovered = await second.start()
    for id in ids:
        assert (await (await second.get_sandbox(id)).exec(["true"])).success
    assert time.monotonic() - started < 10
    assert sorted(recovered.adopted) == sorted(ids)
    assert len(await second.list_sandboxes(state=State.RUNNING)) == 100
