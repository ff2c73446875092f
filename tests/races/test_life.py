"""Random operations on the lives of sandboxes, many at once, from two processes, which are killed now and then.

Whatever happens: each caller is answered, nothing is made twice, nothing is lost, and nothing outlives its deletion.
`ATOLL_RACE_SEED` repeats the choices of a run, though not the order in which the machine carries them out.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.engines.linux.runtimes.oci_runtimes import locate
from atoll.manager import SandboxManager
from atoll.settings import Settings
from needs import missing, need
from oci.remains import remains
from races.driver import CAP, DEADLINE_S, engine_for
from races.judging import History, compare

SHARES = {"managed": 0.7, "direct": 0.3}
_TESTS = Path(__file__).parents[1]


@pytest.fixture
def settings() -> Iterator[Settings]:
    folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
    folder.chmod(0o755)
    yield Settings(folder / "data", folder / "run")
    shutil.rmtree(folder, ignore_errors=True)


def need_runtime(name: str) -> None:
    need("root")
    if name != "native" and locate(name, Path("/nonexistent")) is None:
        missing(f"needs {name}: run 'make setup-test'")


class Role:
    """One of the two processes, started again after every kill until its share of the operations is done."""

    def __init__(self, role: str, engine: str, settings: Settings, log: Path, dice: random.Random) -> None:
        self.role, self.engine, self.settings, self.log, self.dice = role, engine, settings, log, dice
        self.killed: set[int] = set()

    async def run(self, operations: int, kills: int) -> None:
        marks = sorted(self.dice.sample(range(1, operations), kills))
        done = 0
        while True:
            process = await self._start(operations - done)
            if marks:
                mark = marks.pop(0)
                if await self._until(process, mark - done):
                    self.killed.add(process.pid)
                    process.kill()
            async with asyncio.timeout(operations * 2 + 3 * DEADLINE_S):
                errors = (await process.communicate())[1].decode()
            done += self._answered(process.pid)
            if process.returncode == 0:
                return
            assert process.pid in self.killed, errors

    async def _start(self, operations: int) -> asyncio.subprocess.Process:
        places = (str(self.settings.data_dir), str(self.settings.run_dir), str(self.log))
        words = ("-m", "races.driver", self.role, self.engine, *places, str(self.dice.random()), str(operations))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), *sys.path])}
        return await asyncio.create_subprocess_exec(
            sys.executable, *words, stderr=asyncio.subprocess.PIPE, env=environment
        )

    async def _until(self, process: asyncio.subprocess.Process, answers: int) -> bool:
        """False: it ended before that many calls were answered."""
        ended = asyncio.ensure_future(process.wait())
        try:
            while not ended.done() and self._answered(process.pid) < answers:
                await asyncio.wait({ended}, timeout=0.02)
            return not ended.done()
        finally:
            ended.cancel()

    def _answered(self, pid: int) -> int:
        if not self.log.exists():
            return 0
        mark = f'"by": {pid}, "answered"'
        return sum(1 for line in self.log.read_text().splitlines() if mark in line)


async def race(name: str, settings: Settings, operations: int, kills: int) -> None:
    need_runtime(name)
    seed = os.environ.get("ATOLL_RACE_SEED") or os.urandom(4).hex()
    print(f"ATOLL_RACE_SEED={seed}")
    log, began = settings.data_dir.parent / "log", time.monotonic()
    roles = [Role(role, name, settings, log, random.Random(f"{seed} {role}")) for role in SHARES]
    await asyncio.gather(*(each.run(int(operations * SHARES[each.role]), kills) for each in roles))
    history = History.read(log, {pid for each in roles for pid in each.killed})
    faults = [*history.faults, *await settle(name, settings, history)]
    print(json.dumps(history.outcomes, indent=1, sort_keys=True))
    print("slowest", dict(sorted(history.slowest.items())))
    print(f"{history.verbs.total()} operations in {time.monotonic() - began:.0f} s, {len(faults)} faults")
    if faults and (kept := os.environ.get("ATOLL_RACE_LOG")):
        shutil.copy(log, kept)
    assert faults == [], "\n".join(faults[:40])


async def settle(name: str, settings: Settings, history: History) -> list[str]:
    """The faults that are left when all is quiet, and what is left after deleting everything."""
    engine = engine_for(name, settings)
    manager = SandboxManager(2 * CAP, engine=engine, settings=settings, state_dir=settings.data_dir / "manager")
    recovered = await manager.start()
    faults = [f"{id} could not be settled" for id in recovered.failed]
    faults += await compare(manager, engine, history)
    report = await manager.cleanup()
    faults += [f"{id} could not be deleted: {why}" for id, why in report.failed.items()]
    await engine.gc()
    await engine.aclose()
    shutil.rmtree(settings.data_dir / "manager")
    return faults + remains(settings)


@pytest.mark.timeout(180)
async def test_lives_do_not_get_in_each_others_way(settings: Settings) -> None:
    await race("native", settings, operations=100, kills=1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["native", "runc", "runsc"])
async def test_two_thousand_operations(settings: Settings, name: str) -> None:
    await race(name, settings, operations=2000, kills=8)
