"""`exec true` in a running sandbox compared with a plain spawn and wait, and how much a flood beside it slows it
down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from atoll import AsyncSandbox
from benchmarks.measure import Figure, take_turns
from benchmarks.programs import spawn_and_wait, static_true

ROUNDS = 400


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    program = static_true(directory)
    async with AsyncSandbox(engine=engine, volumes=[f"{directory}:/bench:ro"]) as sandbox:

        async def plain() -> None:
            spawn_and_wait(program)

        async def ours() -> None:
            assert (await sandbox.exec(["/bench/true"])).success

        quiet = await take_turns({"spawn": plain, "exec": ours}, ROUNDS)
        yield Figure(
            "exec true, p50",
            quiet["exec"].p50 * 1e3,
            quiet["spawn"].p50 * 1e3,
            "ms",
            "spawn and wait of a static true",
            at_most=2.5,
            detail={"p99": quiet["exec"].p99 * 1e3},
        )
        async with _flood(sandbox):
            loud = await take_turns({"exec": ours}, ROUNDS // 2)
        yield Figure(
            "exec true beside a flood, p50",
            loud["exec"].p50 * 1e3,
            quiet["exec"].p50 * 1e3,
            "ms",
            "the same without the flood",
            at_most=5.0,
            detail={"p99": loud["exec"].p99 * 1e3},
        )


@contextlib.asynccontextmanager
async def _flood(sandbox: AsyncSandbox) -> AsyncIterator[None]:
    command = await sandbox.start(["cat", "/dev/zero"], max_output_bytes=4096)

    async def drain() -> None:
        async for _ in command:
            pass

    draining = asyncio.create_task(drain())
    await asyncio.sleep(0.2)
    try:
        yield
    finally:
        await command.kill()
        await draining
