"""From nothing to the first result, against what the engine is built upon."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

from atoll import AsyncSandbox
from benchmarks.measure import Figure, take_turns

ROUNDS = 60
BWRAP = (
    "bwrap --unshare-all --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 "
    "--proc /proc --dev /dev --tmpfs /tmp true"
).split()


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    del directory
    if engine != "bubblewrap":
        return

    async def bare() -> None:
        subprocess.run(BWRAP, check=True)

    async def ours() -> float:
        started = time.perf_counter()
        async with AsyncSandbox(engine=engine) as sandbox:
            assert (await sandbox.exec(["true"])).success
            return time.perf_counter() - started

    found = await take_turns({"bwrap": bare, "ours": ours}, ROUNDS)
    yield Figure(
        "process: create to first result, p50",
        found["ours"].p50 * 1e3,
        found["bwrap"].p50 * 1e3,
        "ms",
        "bare bwrap",
        at_most=3.0,
        detail={"p99": found["ours"].p99 * 1e3},
    )
