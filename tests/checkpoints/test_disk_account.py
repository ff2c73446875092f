"""One account for a sandbox and all that it keeps: no way around the disk limit by saving and going back."""

from __future__ import annotations

import asyncio
import os
import shutil

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.errors import SandboxResourceError
from atoll.model import Cause
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.storage import BtrfsLayers, Layers, btrfs
from checkpoints.conftest import MakeSandbox

MIB = 1 << 20
HOLD = "import os, time; kept = os.urandom(16 << 20); open('ready', 'w'); time.sleep(1000)"
WRITE = "head -c {mib}m /dev/urandom >{name} && sync {name}"


async def written(sandbox: AsyncSandbox, mib: int, name: str = "data") -> bool:
    done = await sandbox.exec(WRITE.format(mib=mib, name=name), timeout=60)
    if not done.success:
        assert done.cause is Cause.DISK_FULL
        await sandbox.exec(f"rm -f {name}", timeout=30)
    return done.success


async def until_written(sandbox: AsyncSandbox, mib: int) -> None:
    """The kernel gives the space of what was deleted back by itself, soon."""
    async with asyncio.timeout(40):
        while not await written(sandbox, mib):
            continue


def taken(engine: LinuxEngine) -> int:
    """Of the whole pool, whoever counts it."""
    os.sync()
    return shutil.disk_usage(engine.layout.layers._pool.directory).used  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", ["native", pytest.param("runc", marks=pytest.mark.again)], indirect=True)
async def test_checkpoints_and_restarts_do_not_pass_the_limit(engine: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(engine, disk="48m") as sandbox:
        before, kept = taken(engine), 0
        for number in range(5):
            if await written(sandbox, 20):
                kept += 1
                await sandbox.checkpoint(f"round-{number}")
            await sandbox.exec("rm -f data", timeout=30)
            await sandbox.restart()
        assert kept == 2
        assert taken(engine) - before < 60 * MIB
        assert 40 * MIB <= ((await sandbox.stats()).disk_bytes or 0) <= 48 * MIB


async def test_the_space_of_a_deleted_checkpoint_comes_back(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(native, disk="32m") as sandbox:
        assert await written(sandbox, 20)
        state = await sandbox.checkpoint()
        await sandbox.exec("rm data", timeout=30)
        assert not await written(sandbox, 20)
        await sandbox.delete_checkpoint(state)
        await until_written(sandbox, 20)


async def test_what_a_restart_throws_away_is_free_at_once(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(native, disk="32m") as sandbox:
        for _ in range(3):
            assert await written(sandbox, 24)
            await sandbox.restart()


async def test_a_sandbox_whose_account_is_full_can_go_back_and_start(
    native: LinuxEngine, sandbox_on: MakeSandbox
) -> None:
    async with sandbox_on(native, disk="16m") as sandbox:
        await sandbox.write_file("first", "1")
        state = await sandbox.checkpoint("early")
        assert await written(sandbox, 12)
        full = await sandbox.checkpoint("full")
        await sandbox.exec("head -c 100m /dev/zero >more", timeout=60)
        for target in (full, state, full):
            await sandbox.rollback(target)
            assert await sandbox.read_file("first") == "1"
        assert not await written(sandbox, 12, "again")


async def test_a_fork_is_an_account_of_its_own(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(native, disk="32m") as sandbox:
        assert await written(sandbox, 12)
        (fork,) = await sandbox.fork()
        async with fork:
            assert await written(sandbox, 16, "other")
            assert await written(fork, 16, "other")  # 12 of its 32 it took over
            assert not await written(fork, 16, "third")


@pytest.mark.parametrize("engine", ["runsc"], indirect=True)
async def test_saved_memory_counts(engine: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    async with sandbox_on(engine, disk="1g") as sandbox:
        state = await sandbox.checkpoint(memory=True)
        (kept,) = engine._storage.records.of(sandbox.id)
        assert kept.memory_bytes > 0
        account = engine.layout.layers
        assert _limit(account, sandbox.id) == (1 << 30) - kept.memory_bytes
        await sandbox.delete_checkpoint(state)
        assert _limit(account, sandbox.id) == 1 << 30
    async with sandbox_on(engine, disk="4m") as sandbox:
        await sandbox.start(["python3", "-c", HOLD])
        async with asyncio.timeout(30):
            while not await sandbox.exists("ready"):
                continue
        with pytest.raises(SandboxResourceError, match="disk limit"):
            await sandbox.checkpoint(memory=True)
        assert await sandbox.checkpoints() == []
        assert (await sandbox.exec("echo on", timeout=20)).stdout == "on\n"


def _limit(layers: Layers, layer_id: str) -> int | None:
    assert isinstance(layers, BtrfsLayers)
    number = layers._account(layers._pool.directory, layer_id)
    assert number is not None
    quota = btrfs.account_quota(layers._pool.directory, number)
    return quota.limit_bytes if quota is not None else None


async def test_accounts_go_with_their_sandboxes(native: LinuxEngine, sandbox_on: MakeSandbox) -> None:
    pool = native.layout.layers._pool.directory  # type: ignore[attr-defined]
    async with sandbox_on(native, disk="32m"), sandbox_on(native, disk="32m") as sandbox:
        assert await written(sandbox, 4)
        await sandbox.checkpoint()
        await sandbox.restart()
        assert len(btrfs.accounts(pool)) == 2
        hidden = [name for name in os.listdir(pool) if name.startswith(".")]
        assert sorted(name.rpartition(".")[2] for name in hidden) == ["account", "account"]
    async with asyncio.timeout(40), sandbox_on(native):
        while len(btrfs.accounts(pool)) > 1:
            btrfs.free_soon(pool)
            await native.gc()
