"""How many sandboxes a second: made, used once and deleted, several at a time. And Docker's loop of the same kind."""

from __future__ import annotations

import asyncio
import functools
import secrets
import subprocess
import time
from collections.abc import Awaitable, Callable

from benchmarks.docker import IMAGE
from benchmarks.measure import Figure

PARALLEL = 8
_CYCLES = 48


async def against_docker(name: str, once: Callable[[], Awaitable[None]], at_least: float) -> Figure:
    """`once` makes a sandbox, runs a command in it and deletes it."""
    await per_second(once, PARALLEL)
    rates = [(await per_second(once, 4 * _CYCLES), await per_second(_docker_cycle, _CYCLES)) for _ in range(2)]
    mine, theirs = (sum(each) / len(rates) for each in zip(*rates, strict=True))
    what = f"{name}: create, exec, delete, {PARALLEL} at a time"
    return Figure(what, mine, theirs, "per s", "docker run, exec, rm", at_least=at_least)


async def per_second(once: Callable[[], Awaitable[None]], cycles: int) -> float:
    left = iter(range(cycles))

    async def worker() -> None:
        for _ in left:
            await once()

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(PARALLEL)))
    return cycles / (time.perf_counter() - started)


async def docker(*arguments: str) -> None:
    process = await asyncio.create_subprocess_exec("docker", *arguments, stdout=subprocess.DEVNULL)
    assert await process.wait() == 0


@functools.cache
def has_docker() -> bool:
    """Whether an engine answers that has the image of `benchmarks.docker`."""
    try:
        return subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


async def _docker_cycle() -> None:
    name = f"atoll-bench-{secrets.token_hex(4)}"
    await docker("run", "-d", "--network", "none", "--name", name, IMAGE, "sleep", "1000")
    await docker("exec", name, "true")
    await docker("rm", "-f", name)
