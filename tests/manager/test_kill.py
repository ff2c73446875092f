"""kill -9 of the manager's process at random moments, under load, and a new one after it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from atoll.engines.host.process_ref import _stat_fields
from atoll.manager import SandboxManager
from atoll.model import State
from atoll.settings import Settings
from manager.engines import TroubledEngine
from manager.waiting import until

Make = Callable[..., SandboxManager]
_SUBREAPER = 36


@pytest.fixture
def _adopts_orphans() -> Iterator[None]:
    """What the killed program started becomes a child of ours, so that nothing of it stays in the process table."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(_SUBREAPER, 0, 0, 0, 0)
    reap()


def reap() -> None:
    """Sandboxes whose maker was killed are our children, and somebody has to wait for those that ended."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    for pid in map(int, children):
        fields = _stat_fields(pid)
        if fields is not None and fields[0] == "Z":
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


class History:
    """What the killed programs were told. Nothing else counts: an answer that nobody got may be either way."""

    def __init__(self, path: Path) -> None:
        self.lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.ups = sum("up" in line for line in self.lines)

    def check(self) -> set[str]:
        """Every listing was right. The ids that must be there now."""
        made: set[str] = set()
        ending: set[str] = set()
        ended: set[str] = set()
        seen: list[str] = []
        for line in self.lines:
            match line:
                case {"made": id}:
                    assert id not in seen, "an id was given twice"
                    seen.append(id)
                    made.add(id)
                case {"ending": id}:
                    ending.add(id)
                case {"ended": id}:
                    ended.add(id)
                case {"up": listed}:
                    assert made - ending <= set(listed), "a sandbox that was acknowledged is lost"
                    assert not ended & set(listed), "a sandbox that was deleted came back"
                    assert all(state == State.RUNNING for state in listed.values()), line["odd"]
        return made - ending

    def contents(self, alive: set[str]) -> Iterator[tuple[str, str, str | None]]:
        for line in self.lines:
            id = line.get("wrote") or line.get("started")
            if id in alive:
                yield id, line["text"], line.get("command")


async def killed_again_and_again(
    make: Make, engine: TroubledEngine, settings: Settings, folder: Path, kills: int, seconds: float
) -> int:
    dice = random.Random(time.time_ns())
    async with make() as first:  # the engine makes its base files once, and not under fire
        await first.create_sandbox()
    log, until_then, done = folder / "log", time.monotonic() + seconds, 0
    arguments = [engine.name, str(settings.data_dir), str(settings.run_dir), str(folder / "state"), str(log)]
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    while done < kills and time.monotonic() < until_then:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "manager.crash_driver", *arguments, str(dice.random()), env=environment
        )
        if dice.random() < 0.7:  # else it may be killed while it recovers
            before = History(log).ups
            await until(lambda: History(log).ups > before or process.returncode is not None, 60)  # noqa: B023
        else:
            before = len(History(log).lines)
            await until(lambda: len(History(log).lines) > before or process.returncode is not None, 60)  # noqa: B023
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), dice.random() * 0.5)
        assert process.returncode is None, "the program ended by itself"
        process.kill()
        await process.wait()
        done += 1
        reap()
        History(log).check()
        database = sqlite3.connect(folder / "state" / "manager.db")
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        database.close()
    await verify(make(), engine, History(log))
    return done


async def verify(manager: SandboxManager, engine: TroubledEngine, history: History) -> None:
    expected = history.check()
    await manager.start()
    records = {record.id: record for record in await manager.list_sandboxes()}
    assert expected <= set(records)
    # This manager has no pool: a spare of the last one is on its way out.
    deadline = time.monotonic() + 20
    while (there := {handle.sandbox_id for handle in await engine.list()}) != set(records):
        assert time.monotonic() < deadline, f"something is there that nobody knows: {there ^ set(records)}"
        await asyncio.sleep(0.05)
    for id, text, command in history.contents(expected):
        sandbox = await manager.get_sandbox(id)
        if command is None:
            assert await sandbox.read_file(f"file-{text}") == text
        else:
            output = await anext(aiter(await sandbox.command(command)))
            assert output.text == f"{text}\n"
    report = await manager.cleanup()
    assert report.failed == {}
    assert await engine.list() == []


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_adopts_orphans")
async def test_killing_the_manager_at_any_moment_loses_and_leaks_nothing(
    make_manager: Make, engine: TroubledEngine, settings: Settings, folder: Path
) -> None:
    assert await killed_again_and_again(make_manager, engine, settings, folder, kills=6, seconds=20) >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_adopts_orphans")
async def test_two_hundred_kills_lose_and_leak_nothing(
    make_manager: Make, engine: TroubledEngine, settings: Settings, folder: Path
) -> None:
    kills = int(os.environ.get("ATOLL_TEST_KILLS", "200"))
    assert await killed_again_and_again(make_manager, engine, settings, folder, kills=kills, seconds=1500) == kills
