"""What a sandbox notices of a bomb in the one beside it: the 99th percentile of `exec true`, compared with the same in
quiet.

Quiet and bombed measurements take turns, each bomb in a new sandbox with half a CPU.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

from atoll import AsyncSandbox
from atoll.engines import registry
from atoll.errors import SandboxError
from atoll.model import SandboxSpec
from atoll.settings import Settings
from benchmarks.measure import Figure, Samples

ENGINES = ("native", "oci")
LIMITS = {"memory_bytes": "96m", "pids": 64, "disk_bytes": "64m", "cpus": 0.5, "open_files": 256}
SAMPLES = 300
TURNS = 3
BOMBS = {
    "forks": """
import os, time
while True:
    try:
        if os.fork() == 0: time.sleep(0.2); os._exit(0)
    except OSError: pass
""",
    "memory": """
import os
while True:
    if os.fork() == 0:
        held = []
        while True: held.append(bytearray(1 << 20))
    os.wait()
""",
    "disk": """
while True:
    try: open("f", "wb").write(bytes(100 << 20))
    except OSError: pass
""",
    "files": """
import os
while True:
    try:
        for n in range(100_000): os.close(os.open(f"f{n}", os.O_CREAT | os.O_WRONLY))
    except OSError: pass
""",
    "descriptors": """
import os
held = []
while True:
    try: held += os.pipe()
    except OSError:
        for fd in held: os.close(fd)
        held = []
""",
}
"""The bombs. Each continues until it is stopped."""


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    if engine not in ENGINES:
        return
    settings = Settings(directory / "data", directory / "run")
    made = registry.get(engine, settings)
    try:
        async with AsyncSandbox(SandboxSpec(), engine=made, settings=settings) as neighbour:
            for name, bomb in BOMBS.items():
                bomber = functools.partial(AsyncSandbox, SandboxSpec.of(limits=LIMITS), engine=made, settings=settings)
                quiet, loud = await _turns(neighbour, bomber, bomb)
                text = f"{engine}: exec beside a bomb of {name}, p99"
                detail = {"p50": loud.p50 * 1e3, "quiet p50": quiet.p50 * 1e3}
                yield Figure(text, loud.p99 * 1e3, quiet.p99 * 1e3, "ms", "in quiet", at_most=2.0, detail=detail)
    finally:
        await made.aclose()


async def _turns(neighbour: AsyncSandbox, bomber: Callable[[], AsyncSandbox], bomb: str) -> tuple[Samples, Samples]:
    quiet: list[float] = []
    loud: list[float] = []
    for _ in range(TURNS):
        quiet += await _ask(neighbour)
        async with bomber() as beside:
            burning = asyncio.create_task(_burn(beside, bomb))
            await asyncio.sleep(0.5)
            loud += await _ask(neighbour)
            burning.cancel()
            with suppress(asyncio.CancelledError):
                await burning
    return Samples(tuple(quiet)), Samples(tuple(loud))


async def _ask(sandbox: AsyncSandbox) -> list[float]:
    found = []
    for _ in range(SAMPLES // TURNS):
        started = time.perf_counter()
        assert (await sandbox.exec(["true"], timeout=30)).success
        found.append(time.perf_counter() - started)
        await asyncio.sleep(0.005)
    return found


async def _burn(sandbox: AsyncSandbox, bomb: str) -> None:
    """Run the bomb again as soon as it has ended, because a bomb may kill itself."""
    while True:
        with suppress(SandboxError):
            await sandbox.exec(["python3", "-c", bomb], timeout=60)
        await asyncio.sleep(0.01)
