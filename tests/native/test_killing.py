"""Losing any of our processes at any moment leaves a complete sandbox that is listed, or nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from atoll.engines.host import process_ref
from atoll.engines.linux.native_engine import NativeEngine
from atoll.errors import SandboxError
from atoll.model import SandboxSpec
from atoll.settings import Settings
from native import killing
from native.conftest import output
from native.launchers import left_behind


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(20, marks=pytest.mark.timeout(180)),
        pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
async def test_killing_the_creator(settings: Settings, rounds: int) -> None:
    command = (sys.executable, killing.__file__, str(settings.data_dir), str(settings.run_dir), str(rounds))
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert not _waiting_launchers()


def _waiting_launchers() -> list[int]:
    """Launchers whose process of ours is dead. They end when their socket does."""
    found = []
    for pid in process_ref.each_process():
        with suppress(OSError):
            if b"atoll-native" in Path(f"/proc/{pid}/cmdline").read_bytes() and _parent(pid) == 1:
                found.append(pid)
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(20, marks=pytest.mark.timeout(120)),
        pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
async def test_killing_the_launcher(engine: NativeEngine, rounds: int) -> None:
    await engine.delete(await engine.create("warm", SandboxSpec()))
    for number in range(rounds):
        task = asyncio.create_task(engine.create("a", SandboxSpec()))
        await asyncio.sleep(random.uniform(0, 0.012))
        for pid in process_ref.descendants(os.getpid()):
            with suppress(OSError):
                if b"atoll-native" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        try:
            handle = await task
        except SandboxError:
            assert await engine.list() == [], number
            assert not engine.layout.group("a").exists()
        else:
            assert await output(engine, handle, "echo whole") == "whole\n"
            await engine.delete(handle)
    await engine.aclose()
    assert left_behind(engine) == []
