"""Sandboxes of one program share an engine by its name, and nobody has to close it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap

import pytest

from atoll import AsyncSandbox
from atoll.engines import leases
from atoll.settings import Settings


@pytest.fixture(autouse=True)
def quick_to_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LINGER_S", 0.01)


def settings_in(folder: object) -> Settings:
    return Settings.load({"ATOLL_DATA_DIR": f"{folder}/data", "ATOLL_RUN_DIR": f"{folder}/run"})


async def test_the_next_sandbox_uses_the_same_engine(session_settings: Settings) -> None:
    first, second = (AsyncSandbox(engine="bubblewrap", settings=session_settings) for _ in range(2))
    try:
        assert await first.access.engine() is await second.access.engine()
    finally:
        await first.cleanup()
        await second.cleanup()


async def test_it_is_closed_a_while_after_the_last_one(session_settings: Settings) -> None:
    sandbox = AsyncSandbox(engine="bubblewrap", settings=session_settings)
    engine = await sandbox.access.engine()
    held = sandbox.access.choice.lease
    assert held is not None
    closed = asyncio.Event()

    async def note() -> None:
        closed.set()

    engine.aclose = note  # type: ignore[method-assign]
    await sandbox.cleanup()
    await sandbox.cleanup()
    async with asyncio.timeout(10):
        await closed.wait()
    assert held.users == 0
    other = AsyncSandbox(engine="bubblewrap", settings=session_settings)
    assert await other.access.engine() is not engine
    await other.cleanup()


def test_an_event_loop_that_ends_closes_it(session_settings: Settings) -> None:
    closed = []

    async def use() -> None:
        engine = (await leases.acquire("bubblewrap", session_settings)).engine

        async def note() -> None:
            closed.append(asyncio.get_running_loop())

        engine.aclose = note  # type: ignore[method-assign]

    asyncio.run(use())
    assert len(closed) == 1
    asyncio.run(use())
    assert len(closed) == 2


PROGRAM = """
import asyncio, os, subprocess, threading

from pathlib import Path
from atoll import AsyncSandbox, Sandbox

async def use():
    async with AsyncSandbox() as sandbox:
        assert (await sandbox.exec(["true"])).success

with Sandbox() as sandbox:
    assert sandbox.exec(["true"]).success
asyncio.run(use())
others = [threading.Thread(target=asyncio.run, args=(use(),)) for _ in range(3)]
for other in others: other.start()
for other in others: other.join()
child = os.fork()
if child == 0:
    asyncio.run(use())
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
with Sandbox() as sandbox:
    assert sandbox.exec(["true"]).success
"""


def test_a_program_with_many_event_loops_leaves_nothing(
    session_folder: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synchronous, asynchronous, in threads and in a child: no process, no mount, no warning."""
    monkeypatch.setenv("ATOLL_DATA_DIR", f"{session_folder}/many/data")
    monkeypatch.setenv("ATOLL_RUN_DIR", f"{session_folder}/many/run")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = subprocess.run(["pgrep", "-f", f"{session_folder}/many"], capture_output=True, text=True)
    assert found.stdout == ""
    with open("/proc/self/mounts") as table:
        assert f"{session_folder}/many" not in table.read()
