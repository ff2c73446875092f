"""The figures that the foundation promises. Slow: run by `make test-slow`."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from pathlib import Path

import pytest

from atoll import AsyncSandbox, Cause
from atoll.conformance import host
from atoll.conformance.bench import new_mark
from atoll.conformance.check import until
from atoll.conformance.inside import running
from atoll.conformance.process_trees import evil_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MEMORY_BYTES = 100 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_an_evil_tree_is_gone_within_two_seconds_of_its_timeout_every_time(sandbox: AsyncSandbox) -> None:
    for turn in range(200):
        mark = new_mark()
        started = time.monotonic()
        result = await sandbox.exec(evil_tree(mark), timeout=0.2)
        took_s = time.monotonic() - started
        assert result.cause is Cause.TIMEOUT
        assert await running(sandbox, mark) == [], f"turn {turn}"
        assert host.processes(mark) == [], f"turn {turn}"
        assert took_s < 2.2, f"turn {turn}"


async def test_two_hundred_commands_at_once(sandbox: AsyncSandbox) -> None:
    await sandbox.exec("true")
    before = resident_bytes()
    commands = (sandbox.exec(f"echo {n}; while [ ! -e go ]; do sleep 0.1; done", timeout=120) for n in range(200))
    waiting = asyncio.gather(*commands)

    async def all_run() -> bool:
        return len(await sandbox.commands()) == 200

    await until(all_run, "not all commands run at once", within_s=60)
    await sandbox.write_file("go", "")
    assert [result.stdout for result in await waiting] == [f"{n}\n" for n in range(200)]
    assert resident_bytes() - before < MEMORY_BYTES


async def test_ten_gigabytes_of_output_cost_no_memory(sandbox: AsyncSandbox) -> None:
    await sandbox.exec("head -c 50000000 /dev/zero")
    gc.collect()
    before = resident_bytes()
    highest = 0

    async def watch() -> None:
        nonlocal highest
        while True:
            highest = max(highest, resident_bytes())
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    result = await sandbox.exec("head -c 10000000000 /dev/zero", timeout=600)
    watching.cancel()
    await asyncio.wait([watching])
    assert result.success
    assert result.truncated
    missing = 10_000_000_000 - (8 << 20)
    assert f"{missing} bytes left out" in result.stdout
    assert highest - before < MEMORY_BYTES


async def test_ten_gigabytes_through_an_iteration_are_all_there(sandbox: AsyncSandbox) -> None:
    command = await sandbox.start("head -c 10000000000 /dev/zero", max_output_bytes=1000)
    before, total = resident_bytes(), 0
    async for piece in command:
        total += len(piece.data)
    assert total == 10_000_000_000
    assert resident_bytes() - before < MEMORY_BYTES
