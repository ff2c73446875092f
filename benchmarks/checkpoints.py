"""Saved states: whether their cost depends on the size, and what undo and forks cost compared with plain work."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

from atoll import AsyncSandbox
from atoll.engines.linux.native_engine import NativeEngine
from atoll.settings import Settings
from benchmarks.measure import Figure, Samples, take_turns

ROUNDS, FORKS, COMMANDS = 20, 100, 200
MIB = 1 << 20
SCRIPT = "for n in 1 2 3 4 5 6 7 8; do sed -i s/a/b/ file; grep -c b file >count; done"
"""About what one step of an AI agent does: a few small programs that read and write files."""


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    if engine != "native":
        return
    settings = Settings(directory / "data", directory / "run")
    ours = NativeEngine(settings)
    try:
        async for figure in sizes(ours, settings):
            yield figure
        yield await forks(ours, settings)
        yield await undoing(ours, settings)
    finally:
        for handle in await ours.list():
            await ours.delete(handle)
        await ours.gc()
        await ours.aclose()


async def sizes(engine: NativeEngine, settings: Settings) -> AsyncIterator[Figure]:
    """Compare a small and a large change. Both are flushed to disk first, as a checkpoint does not cause these
    writes."""
    made = {}
    for size in (10, 1000):
        made[size] = await AsyncSandbox(engine=engine, settings=settings).create()
        await made[size].exec(f"head -c {size}m /dev/urandom >big; echo a >file; sync", timeout=300)
        await made[size].checkpoint("base")
    checkpoints, rollbacks = {}, {}

    def saving(sandbox: AsyncSandbox):  # type: ignore[no-untyped-def]
        async def once() -> float:
            await sandbox.exec("echo more >>file")
            started = time.perf_counter()
            checkpoint = await sandbox.checkpoint()
            seconds = time.perf_counter() - started
            await sandbox.delete_checkpoint(checkpoint)
            return seconds

        return once

    def going_back(sandbox: AsyncSandbox):  # type: ignore[no-untyped-def]
        async def once() -> None:
            await sandbox.rollback("base")

        return once

    checkpoints = await take_turns({str(size): saving(sandbox) for size, sandbox in made.items()}, ROUNDS)
    rollbacks = await take_turns({str(size): going_back(sandbox) for size, sandbox in made.items()}, ROUNDS)
    for what, found in (("checkpoint", checkpoints), ("rollback", rollbacks)):
        yield Figure(
            f"{what} of 1 GB of changes, p50",
            found["1000"].p50 * 1e3,
            found["10"].p50 * 1e3,
            "ms",
            "of 10 MB",
            at_most=1.5,
            detail={"p99": found["1000"].p99 * 1e3},
        )
    if (commit := await asyncio.to_thread(docker_commit)) is not None:
        yield Figure(
            "checkpoint of 10 MB, p50",
            checkpoints["10"].p50 * 1e3,
            commit.p50 * 1e3,
            "ms",
            "docker commit",
            at_most=0.05,
        )
    for sandbox in made.values():
        await sandbox.cleanup()


def docker_commit() -> Samples | None:
    """Measure `docker commit` of a container that wrote as much. None if no Docker engine answers."""
    if shutil.which("docker") is None or subprocess.run(["docker", "version"], capture_output=True).returncode:
        return None
    images = subprocess.run(["docker", "images", "-q"], capture_output=True, text=True).stdout.split()
    if not images:
        return None
    name = f"atoll-bench-{time.time_ns()}"
    line = "head -c 10m /dev/urandom >/big; sleep 1000"
    subprocess.run(
        ["docker", "run", "-d", "--name", name, images[0], "sh", "-c", line], check=True, capture_output=True
    )
    seconds = []
    try:
        time.sleep(1)
        for number in range(5):
            started = time.perf_counter()
            subprocess.run(["docker", "commit", name, f"{name}:{number}"], check=True, capture_output=True)
            seconds.append(time.perf_counter() - started)
    finally:
        subprocess.run(["docker", "rm", "-f", name], capture_output=True)
        subprocess.run(["docker", "rmi", *(f"{name}:{number}" for number in range(5))], capture_output=True)
    return Samples(tuple(seconds))


async def forks(engine: NativeEngine, settings: Settings) -> Figure:
    turns = asyncio.Semaphore(8)

    async def plain() -> AsyncSandbox:
        async with turns:
            return await AsyncSandbox(engine=engine, settings=settings).create()

    async with AsyncSandbox(engine=engine, settings=settings) as sandbox:
        await sandbox.exec("head -c 10m /dev/urandom >big; sync")
        (warm,) = await sandbox.fork(1)
        await warm.cleanup()
        started = time.perf_counter()
        made = await asyncio.gather(*(plain() for _ in range(FORKS)))
        plainly = time.perf_counter() - started
        await asyncio.gather(*(each.cleanup() for each in made))
        started = time.perf_counter()
        twins = await sandbox.fork(FORKS)
        forked = time.perf_counter() - started
        await asyncio.gather(*(each.cleanup() for each in twins))
    return Figure(f"{FORKS} forks", forked, plainly, "s", f"{FORKS} plain creates", at_most=2.0)


async def undoing(engine: NativeEngine, settings: Settings) -> Figure:
    seconds = {}
    for undo in (False, True):
        async with AsyncSandbox(engine=engine, settings=settings, undo=undo) as sandbox:
            await sandbox.exec("seq 1000 | sed s/$/a/ >file")
            started = time.perf_counter()
            for _ in range(COMMANDS):
                assert (await sandbox.exec(SCRIPT)).success
            seconds[undo] = time.perf_counter() - started
    return Figure(f"{COMMANDS} commands with undo", seconds[True], seconds[False], "s", "without", at_most=1.5)
