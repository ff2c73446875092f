from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.engines.host import process_ref
from atoll.engines.unsafe_none import UnsafeEngine, UnsafeWarning
from atoll.errors import ImageNotFoundError, UnsupportedError
from atoll.model import Capability, Cause, SandboxSpec, State
from atoll.settings import Settings
from atoll.waiting import Deadline
from inside import run
from leftovers import leftovers


@pytest.fixture
def engine(settings: Settings) -> Iterator[UnsafeEngine]:
    engine = UnsafeEngine(settings)
    yield engine
    left = leftovers(settings)
    for handle in asyncio.run(engine.list()):
        asyncio.run(engine.delete(handle))
    assert left == []


async def test_it_says_loudly_that_it_isolates_nothing(engine: UnsafeEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.warns(UnsafeWarning, match="no isolation"):
        handle = await engine.create("one", SandboxSpec())
    assert "no isolation" in caplog.text
    assert Capability.ISOLATION not in (await engine.describe()).capabilities
    await engine.delete(handle)


async def test_it_refuses_a_lifetime(engine: UnsafeEngine) -> None:
    with pytest.raises(UnsupportedError, match="lifetime"):
        await engine.create("one", SandboxSpec.of(limits={"lifetime_s": 60}))


@pytest.mark.filterwarnings("ignore::atoll.engines.unsafe_none.UnsafeWarning")
async def test_it_runs_commands_in_a_clean_environment(engine: UnsafeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "tweet")
    handle = await engine.create("one", SandboxSpec.of(env={"A": "b"}, limits={"open_files": 99}))
    seen = await run(engine, handle, "pwd; ulimit -n; env")
    assert seen.startswith(f"{engine._records.home('one')}/work\n99\n")
    assert "A=b" in seen
    assert "tweet" not in seen
    await engine.delete(handle)
    assert (await engine.inspect(handle)).state is State.MISSING


@pytest.mark.filterwarnings("ignore::atoll.engines.unsafe_none.UnsafeWarning")
async def test_deleting_takes_what_ran_away_from_the_agent(engine: UnsafeEngine) -> None:
    handle = await engine.create("one", SandboxSpec())
    await run(
        engine, handle, "(setsid sleep 1000 >/dev/null 2>&1 &); (cd ../home; exec setsid sleep 1001 &) >/dev/null 2>&1"
    )
    assert ((await engine.stats(handle)).pids or 0) >= 3
    runaways = engine._find_processes("one")
    assert len(runaways) >= 3
    await engine.delete(handle)
    assert not [process for process in runaways if process.is_alive()]


@pytest.mark.filterwarnings("ignore::atoll.engines.unsafe_none.UnsafeWarning")
async def test_what_outlived_a_killed_agent_is_taken_too(engine: UnsafeEngine) -> None:
    handle = await engine.create("one", SandboxSpec())
    await run(engine, handle, "setsid sleep 1000 >/dev/null 2>&1 &")
    record = engine._records.read("one")
    assert record is not None
    assert record.init is not None
    os.kill(record.init.pid, 9)
    assert await process_ref.wait({record.init}, Deadline.after(10))
    assert (await engine.inspect(handle)).cause is Cause.KILLED
    await engine.delete(handle)
    assert engine._find_processes("one") == set()


@pytest.mark.filterwarnings("ignore::atoll.engines.unsafe_none.UnsafeWarning")
async def test_the_same_name_in_another_installation_is_another_sandbox(
    engine: UnsafeEngine, open_folder: Path
) -> None:
    other = UnsafeEngine(Settings(open_folder / "other data", open_folder / "other run"))
    handle, neighbour = [await each.create("same", SandboxSpec()) for each in (engine, other)]
    await engine.delete(handle)
    assert (await other.inspect(neighbour)).state is State.RUNNING
    await other.delete(neighbour)


async def test_what_needs_a_wall_is_refused(engine: UnsafeEngine) -> None:
    with pytest.raises(UnsupportedError, match="isolates nothing"):
        await engine.create("no", SandboxSpec.of(isolation="namespaces"))
    with pytest.raises(UnsupportedError, match="cannot enforce volumes"):
        await engine.create("no", SandboxSpec.of(volumes=[{"host": "/usr", "path": "/data"}]))
    with pytest.raises(ImageNotFoundError):
        await engine.create("no", SandboxSpec.of(image="debian"))
