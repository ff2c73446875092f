from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.engines.process import ProcessEngine
from atoll.manager import SandboxManager
from atoll.settings import Settings
from leftovers import leftovers
from manager.engines import TroubledEngine
from manager.times import ManualClock

MakeManager = Callable[..., contextlib.AbstractAsyncContextManager[SandboxManager]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Temporary, with a short path since sockets allow no long one, and other users may pass through it."""
    folder = Path(tempfile.mkdtemp(prefix="atoll-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def settings(folder: Path) -> Settings:
    return Settings(data_dir=folder / "data", run_dir=folder / "run")


@pytest.fixture
async def engine(settings: Settings) -> AsyncIterator[TroubledEngine]:
    """A working engine, which must have nothing left when the test ends."""
    found = ProcessEngine.probe(settings, thorough=True)
    if not found.available:
        explain = pytest.fail if os.environ.get("CI") else pytest.skip
        explain("; ".join(found.reasons))
    engine = TroubledEngine(settings)
    yield engine
    left = leftovers(settings)
    engine.heal()
    for handle in await engine.list():
        await engine.delete(handle)
    assert left == []


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def make_manager(engine: TroubledEngine, settings: Settings, folder: Path) -> AsyncIterator[Callable[..., Any]]:
    """Makes managers on one engine and one state directory; all are shut down at the end."""
    made: list[SandboxManager] = []

    def make(*args: Any, **options: Any) -> SandboxManager:
        options = {"engine": engine, "settings": settings, "state_dir": folder / "state", **options}
        made.append(SandboxManager(*args, **options))
        return made[-1]

    yield make
    engine.heal()
    for manager in made:
        await manager.cleanup()
    await asyncio.sleep(0)


@pytest.fixture
async def manager(make_manager: Callable[..., SandboxManager]) -> SandboxManager:
    manager = make_manager()
    await manager.start()
    return manager
