"""Nothing is left: not after many sandboxes at once, not when their maker is killed at any moment."""

from __future__ import annotations

import asyncio
import random
import sys
import threading

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.model import SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from oci.conftest import NeedRuntime, empty
from oci.remains import remains

AT_ONCE = 8
_MAKER = """
import asyncio, sys
from pathlib import Path
from atoll.engines.linux.oci_engine import OciEngine
from atoll.model import SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings

async def use(engine, settings):
    limits = {"memory_bytes": "64m", "pids": 64, "disk_bytes": "32m"}
    while True:
        async with AsyncSandbox(SandboxSpec.of(limits=limits), engine=engine, settings=settings) as sandbox:
            await sandbox.exec("sleep 1000 & setsid sleep 1000 & echo x > file", timeout=20)

async def main():
    settings = Settings(Path(sys.argv[1]), Path(sys.argv[2]))
    engine = OciEngine(settings, "runc")
    print("up", flush=True)
    await asyncio.gather(*(use(engine, settings) for _ in range(3)))

asyncio.run(main())
"""


@pytest.mark.parametrize("cycles", [40, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_many_cycles_leave_nothing(runc: LinuxEngine, settings: Settings, cycles: int) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def cycle(number: int) -> None:
        async with turns, AsyncSandbox(SandboxSpec(), engine=runc, settings=settings) as sandbox:
            result = await sandbox.exec(f"echo {number}; sleep 1000 &", timeout=30)
            assert result.stdout == f"{number}\n"

    await asyncio.gather(*(cycle(number) for number in range(cycles)))
    assert await runc.gc() == []
    await runc.aclose()
    assert remains(settings) == []


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
async def test_killing_the_maker_leaves_nothing(settings: Settings, need_runtime: NeedRuntime, kills: int) -> None:
    """Whatever was complete is listed and can be deleted; `gc` removes the rest, and none of it comes back."""
    need_runtime("runc")
    dice = random.Random(3)
    for _ in range(kills):
        maker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _MAKER, str(settings.data_dir), str(settings.run_dir)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert maker.stdout is not None
        assert await maker.stdout.readline() == b"up\n"
        await asyncio.sleep(dice.uniform(0.0, 0.4))
        maker.kill()
        await maker.communicate()
        engine = OciEngine(settings, "runc")
        await engine.gc()
        for handle in await engine.list():
            await engine.inspect(handle)
        await empty(engine)
        assert remains(settings) == []


async def test_gc_touches_nothing_of_a_maker_that_lives(runc: LinuxEngine, settings: Settings) -> None:
    async def make() -> AsyncSandbox:
        return await AsyncSandbox(SandboxSpec(), engine=runc, settings=settings).create()

    async def collect() -> list[str]:
        other = OciEngine(settings, "runc")
        return [removed for _ in range(10) for removed in await other.gc()]

    made, removed = await asyncio.gather(asyncio.gather(*(make() for _ in range(6))), collect())
    assert removed == []
    for sandbox in made:
        assert (await sandbox.exec("echo ok", timeout=20)).stdout == "ok\n"
        await sandbox.cleanup()


@pytest.mark.parametrize("name", ["native", "runc"])
async def test_control_groups_are_not_removed_under_one_that_starts(
    settings: Settings, need_runtime: NeedRuntime, name: str
) -> None:
    """Another engine of the installation finds no sandbox, again and again, and lets go of what sandboxes share."""
    need_runtime("runc")
    engine = NativeEngine(settings) if name == "native" else OciEngine(settings, name)
    other, over = OciEngine(settings), threading.Event()

    def tidy() -> int:
        times = 0
        while not over.is_set():
            other.layout.close()
            times += 1
        return times

    tidying = asyncio.ensure_future(asyncio.to_thread(tidy))
    try:
        for number in range(4):
            await engine.delete(await engine.create(f"one-{number}", SandboxSpec()))
    finally:
        over.set()
        assert await tidying > 10
        await empty(engine)
