"""`killing.py DATA RUN ROUNDS`: kills the process that makes a sandbox at a random moment, again and again, and says
what was left. Each round ends with `gc`, as a new process of ours would do."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

from atoll.engines.linux.native_engine import NativeEngine
from atoll.model import SandboxSpec, State
from atoll.settings import Settings

LONGEST_S = 0.03
PATIENCE_S = 10.0


async def create_for_ever(settings: Settings, round_number: int) -> None:
    engine = NativeEngine(settings)
    for number in range(1000):
        await engine.create(f"k{round_number}-{number}", SandboxSpec())


def killed_at_random(settings: Settings, round_number: int) -> None:
    pid = os.fork()
    if pid == 0:
        asyncio.run(create_for_ever(settings, round_number))
        os._exit(0)
    # Some while the first is being made, some with launchers that wait.
    time.sleep(random.uniform(0, LONGEST_S))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


async def collected(engine: NativeEngine) -> None:
    """A child that was just being started may hold the lock of what its dead parent was making for a moment more."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        await engine.gc()
        seen = [await engine.inspect(handle) for handle in await engine.list()]
        if all(each.state is State.RUNNING for each in seen) or time.monotonic() > deadline:
            return
        await asyncio.sleep(0.02)


async def look(settings: Settings) -> list[str]:
    """Whatever is wrong. Every sandbox that is listed is complete; then all are deleted."""
    engine, wrong = NativeEngine(settings), []
    await collected(engine)
    for handle in await engine.list():
        seen = await engine.inspect(handle)
        if seen.state is not State.RUNNING:
            wrong.append(f"{handle.sandbox_id} is {seen}")
        else:
            (await engine.connect(handle)).close()
        await engine.delete(handle)
    places = engine.layout
    wrong += [f"layer {name}" for name in places.layers.list()]
    await engine.aclose()
    wrong += [f"control group {path}" for path in places.group("x").directories() if path.parent.exists()]
    wrong += [f"file {path}" for name in ("ids", "sandboxes") for path in (places.data / name).glob("*")]
    wrong += [f"file {path}" for path in (settings.run_dir / "oci").glob("*")]
    return wrong


def main() -> None:
    settings = Settings(Path(sys.argv[1]), Path(sys.argv[2]))
    random.seed(os.urandom(8))
    keeper = NativeEngine(settings)  # the pool is made once
    asyncio.run(warm_up(keeper))
    for round_number in range(int(sys.argv[3])):
        killed_at_random(settings, round_number)
        wrong = asyncio.run(look(settings))
        if wrong:
            print(f"round {round_number}: {'; '.join(wrong)}")
            raise SystemExit(1)


async def warm_up(engine: NativeEngine) -> None:
    await engine.delete(await engine.create("warm", SandboxSpec()))
    await engine.aclose()


if __name__ == "__main__":
    main()
