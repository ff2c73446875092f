"""Bombs: contained, named in the cause, and the neighbour still answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from atoll.engines.linux.oci_engine import OciEngine
from atoll.errors import UnsupportedError
from atoll.model import Cause, SandboxSpec, State
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from atoll.waiting import Deadline

MIB = 1 << 20
LIMITS = {"memory_bytes": "96m", "pids": 64, "disk_bytes": "32m", "cpus": 0.5, "open_files": 256}


@asynccontextmanager
async def neighbours(engine: OciEngine, settings: Settings, **limits: object) -> AsyncIterator[AsyncSandbox]:
    """A limited sandbox, and beside it one without limits that must answer all the time."""
    bomber = AsyncSandbox(SandboxSpec.of(limits={**LIMITS, **limits}), engine=engine, settings=settings)
    neighbour = AsyncSandbox(SandboxSpec(), engine=engine, settings=settings)

    async def ask() -> None:
        while True:
            assert (await neighbour.exec(["true"], timeout=10)).success
            await asyncio.sleep(0.05)

    async with bomber, neighbour:
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(ask())
            yield bomber
            asking.cancel()
        assert (await neighbour.exec(["true"], timeout=10)).success


async def test_a_fork_bomb(runc: OciEngine, settings: Settings) -> None:
    async with neighbours(runc, settings) as sandbox:
        bomb = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(2)\n        os._exit(0)"
        result = await sandbox.exec(["python3", "-c", bomb], timeout=20)
        assert result.cause is Cause.PIDS
        stats = await sandbox.stats()
        assert stats.pids is not None
        assert stats.pids <= 64
        await asyncio.sleep(2.5)
        assert (await sandbox.exec("echo still", timeout=20)).stdout == "still\n"


async def test_a_memory_bomb(runc: OciEngine, settings: Settings) -> None:
    async with neighbours(runc, settings) as sandbox:
        result = await sandbox.exec(["python3", "-c", "a = []\nwhile True: a.append(bytearray(1 << 20))"], timeout=20)
        assert (result.exit_code, result.cause) == (137, Cause.OUT_OF_MEMORY)
        inside = await sandbox.exec("tail /dev/zero | cat; exit ${PIPESTATUS[0]}", timeout=20)
        assert (inside.exit_code, inside.cause) == (137, Cause.OUT_OF_MEMORY)
        quiet = await sandbox.exec("exit 3", timeout=20)
        assert (quiet.exit_code, quiet.cause) == (3, Cause.EXIT)
        # A tmpfs is memory too.
        shm = await sandbox.exec("head -c 200m /dev/zero >/dev/shm/fill", timeout=20)
        assert not shm.success
        await sandbox.exec("rm -f /dev/shm/fill", timeout=20)


async def test_a_full_disk(runc: OciEngine, settings: Settings) -> None:
    async with neighbours(runc, settings) as sandbox:
        for _ in range(2):
            result = await sandbox.exec("head -c 100m /dev/zero >fill", timeout=40)
            assert result.cause is Cause.DISK_FULL
        again = await sandbox.exec("echo more >more", timeout=20)
        assert again.success or again.cause is Cause.DISK_FULL
        assert (await sandbox.exec("exit 3", timeout=20)).cause is Cause.EXIT
        used = (await sandbox.stats()).disk_bytes
        assert used is not None
        assert used <= 32 * MIB
        await sandbox.exec("rm fill", timeout=20)
        assert (await sandbox.exec("head -c 8m /dev/zero >fill", timeout=20)).success


@pytest.mark.timeout(180)
async def test_a_flood_of_empty_files_ends_at_the_disk_limit(runc: OciEngine, settings: Settings) -> None:
    flood = "import os\nfor n in range(400_000):\n    os.close(os.open(f'f{n}', os.O_CREAT | os.O_WRONLY))"
    async with neighbours(runc, settings, disk_bytes="8m", cpus=2) as sandbox:
        result = await sandbox.exec(["python3", "-c", flood], timeout=120)
        assert result.cause is Cause.DISK_FULL, result
        used = (await sandbox.stats()).disk_bytes
        assert used is not None
        assert used <= 9 * MIB


async def test_a_limit_on_files_is_refused(runc: OciEngine, settings: Settings) -> None:
    with pytest.raises(UnsupportedError, match="inodes"):
        await AsyncSandbox(SandboxSpec.of(limits={"inodes": 100}), engine=runc, settings=settings).create()


async def test_a_flood_of_descriptors(runc: OciEngine, settings: Settings) -> None:
    flood = "import os\nn = 0\ntry:\n    while True: os.pipe(); n += 2\nexcept OSError as e: print(n, e.errno)"
    async with neighbours(runc, settings) as sandbox:
        count, error = (await sandbox.exec(["python3", "-c", flood], timeout=20)).stdout.split()
        assert int(count) <= 256
        assert int(error) == 24


async def test_a_sandbox_that_dies_as_a_whole_says_why(runc: OciEngine, settings: Settings) -> None:
    """Its first process is killed after memory ran out: the kernel still knows that it did."""
    async with neighbours(runc, settings) as sandbox:
        await sandbox.exec(["python3", "-c", "bytearray(300 << 20)"], timeout=20)
        (handle,) = [found for found in await runc.list() if found.sandbox_id == sandbox.id]
        await runc.layout.group(sandbox.id).kill(Deadline.after(10))
        seen = await runc.inspect(handle)
        assert (seen.state, seen.cause) == (State.STOPPED, Cause.OUT_OF_MEMORY)
        assert "100663296" in seen.reason
