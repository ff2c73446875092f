"""Pausing without a control group: by signals from outside, also against programs that resist."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from atoll.engines.bubblewrap.engine import BubblewrapEngine
from atoll.engines.bubblewrap.stopped_processes import StoppedProcesses, runs
from atoll.model import Handle, State
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings

# Each lets everybody go on, all the time, and stops itself for a moment now and then.
FIGHTERS = """
import os, signal, sys
for _ in range(3):
    os.fork()
while True:
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) > 1:
            try: os.kill(int(name), signal.SIGCONT)
            except OSError: pass
    try: os.kill(os.getpid(), signal.SIGSTOP if os.getrandom(1)[0] < 8 else 0)
    except OSError: pass
"""


async def handle_of(engine: BubblewrapEngine, sandbox: AsyncSandbox) -> Handle:
    return next(each for each in await engine.list() if each.sandbox_id == sandbox.id)


async def state(sandbox: AsyncSandbox, pid: str) -> str:
    return (await sandbox.exec(f"cut -d' ' -f3 /proc/{pid}/stat")).stdout.strip()


async def test_what_was_stopped_before_stays_so_and_another_process_of_ours_can_resume_it(
    engine: BubblewrapEngine, settings: Settings
) -> None:
    async with AsyncSandbox(engine=engine, settings=settings) as sandbox:
        for name in ("stopped", "running"):
            await (await sandbox.start(f"sh -c 'echo $$ > {name}; exec sleep 1000'")).detach()
        wait = "until [ -s stopped ] && [ -s running ]; do sleep 0.01; done; cat stopped running"
        stopped, running = (await sandbox.exec(wait)).stdout.split()
        await sandbox.exec(f"kill -STOP {stopped}; until grep -q ' T ' /proc/{stopped}/stat; do sleep 0.01; done")
        handle, other = await handle_of(engine, sandbox), BubblewrapEngine(settings)
        for _ in range(2):
            await engine.pause(handle)
        still = engine._stopped_processes(handle)
        assert still is not None
        assert len(everybody := still._everybody()) >= 3
        assert not any(runs(each.pid) for each in everybody)
        assert (await other.inspect(handle)).state is State.PAUSED
        for _ in range(2):
            await other.resume(handle)
        assert (await engine.inspect(handle)).state is State.RUNNING
        assert (await state(sandbox, stopped), await state(sandbox, running)) == ("T", "S")


async def test_programs_that_let_each_other_go_on_stand_still_too(engine: BubblewrapEngine, settings: Settings) -> None:
    async with AsyncSandbox(engine=engine, settings=settings) as sandbox:
        await (await sandbox.start(["python3", "-c", FIGHTERS])).detach()
        await sandbox.exec("until [ $(pgrep -fc getrandom) -ge 8 ]; do sleep 0.01; done")
        handle = await handle_of(engine, sandbox)
        await engine.pause(handle)
        # Whoever slipped through is stopped by the next who looks.
        before, seen = -1.0, (await engine.stats(handle)).cpu_s or 0.0
        while seen != before:
            assert (await engine.inspect(handle)).state is State.PAUSED
            await asyncio.sleep(0.2)
            before, seen = seen, (await engine.stats(handle)).cpu_s or 0.0
        await engine.resume(handle)
        assert (await sandbox.exec("echo on")).stdout == "on\n"


@pytest.mark.parametrize("way", ["a pause is given up", "a look comes before a resume"])
async def test_nothing_is_stopped_after_it_was_let_go(
    engine: BubblewrapEngine, settings: Settings, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    begun, go, stop_once = threading.Event(), threading.Event(), StoppedProcesses._stop_once

    def slowly(self: StoppedProcesses) -> bool:
        begun.set()
        go.wait(30)
        return stop_once(self)

    async with AsyncSandbox(engine=engine, settings=settings) as sandbox:
        handle = await handle_of(engine, sandbox)
        if way == "a look comes before a resume":
            await engine.pause(handle)
        monkeypatch.setattr(StoppedProcesses, "_stop_once", slowly)
        looking = asyncio.create_task(engine.pause(handle) if "pause" in way else engine.inspect(handle))
        await asyncio.to_thread(begun.wait, 30)
        ending = looking if "pause" in way else asyncio.create_task(engine.resume(handle))
        if ending is looking:
            looking.cancel()
        await asyncio.wait({ending}, timeout=0.3)  # it must not be done yet
        go.set()
        await asyncio.wait({looking, ending})
        monkeypatch.undo()
        assert (await sandbox.exec("echo on", timeout=10)).stdout == "on\n"


async def test_a_pause_whose_maker_died_or_gave_up(engine: BubblewrapEngine, settings: Settings) -> None:
    async with AsyncSandbox(engine=engine, settings=settings) as sandbox:
        handle = await handle_of(engine, sandbox)
        note = engine._records.home(sandbox.id) / "paused.json"
        note.write_text(json.dumps([]))  # it died before it stopped anybody
        assert (await engine.inspect(handle)).state is State.PAUSED
        waiting = asyncio.create_task(sandbox.exec("echo on"))
        await asyncio.sleep(0.2)
        assert not waiting.done(), "who looked at it has stopped it"
        await engine.resume(handle)
        assert (await waiting).stdout == "on\n"
        pausing = asyncio.create_task(engine.pause(handle))
        while not note.exists():  # noqa: ASYNC110
            await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.wait({pausing})
        if pausing.cancelled():
            assert (await engine.inspect(handle)).state is State.RUNNING
            assert (await sandbox.exec("echo on")).stdout == "on\n"
        await engine.pause(handle)
        await engine.delete(handle)
        assert (await engine.inspect(handle)).state is State.MISSING
