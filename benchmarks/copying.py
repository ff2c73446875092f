"""A large file and many small ones, in and out, against `cp`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

from atoll import AsyncSandbox
from benchmarks.measure import Figure, take_turns

LARGE = 1 << 30
SMALL, SMALL_SIZE = 5000, 2048
ROUNDS = 5


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    large = directory / "large"
    block = os.urandom(1 << 20)
    with large.open("wb") as file:
        for _ in range(LARGE >> 20):
            file.write(block)
    small = directory / "small"
    for number in range(SMALL):
        path = small / f"d{number // 100}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(block[:SMALL_SIZE])
    async with AsyncSandbox(engine=engine) as sandbox:
        async for figure in _large(sandbox, large, directory):
            yield figure
        yield await _small(sandbox, small, directory)


async def _large(sandbox: AsyncSandbox, large: Path, directory: Path) -> AsyncIterator[Figure]:
    # All write a file that does not exist, because some file systems flush a replaced file at once.
    async def copied() -> float:
        (directory / "copy").unlink(missing_ok=True)
        started = time.perf_counter()
        subprocess.run(["cp", str(large), str(directory / "copy")], check=True)
        return time.perf_counter() - started

    async def into() -> float:
        await sandbox.remove("large", missing_ok=True)
        started = time.perf_counter()
        await sandbox.copy_to(large, "large")
        return time.perf_counter() - started

    async def out() -> float:
        (directory / "back").unlink(missing_ok=True)
        started = time.perf_counter()
        await sandbox.copy_from("large", directory / "back")
        return time.perf_counter() - started

    found = await take_turns({"cp": copied, "in": into, "out": out}, ROUNDS, warm_up=1)
    assert (directory / "back").stat().st_size == LARGE
    for name, text in (("in", "1 GiB file in"), ("out", "1 GiB file out")):
        yield Figure(text, LARGE / found[name].p50 / 1e9, LARGE / found["cp"].p50 / 1e9, "GB/s", "cp", at_least=0.5)
    await sandbox.remove("large")
    for name in ("copy", "back"):
        (directory / name).unlink()


async def _small(sandbox: AsyncSandbox, small: Path, directory: Path) -> Figure:
    # Both sides write to a directory that does not exist. Removing the previous one is not measured.
    async def copied() -> float:
        shutil.rmtree(directory / "small-copy", ignore_errors=True)
        started = time.perf_counter()
        subprocess.run(["cp", "-r", str(small), str(directory / "small-copy")], check=True)
        return time.perf_counter() - started

    async def into() -> float:
        await sandbox.remove("small", missing_ok=True)
        started = time.perf_counter()
        await sandbox.copy_to(small, "small")
        return time.perf_counter() - started

    found = await take_turns({"cp": copied, "in": into}, ROUNDS, warm_up=1)
    return Figure(
        "5,000 small files in",
        SMALL / found["in"].p50,
        SMALL / found["cp"].p50,
        "files/s",
        "cp -r",
        at_least=0.5,
    )
