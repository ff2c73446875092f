from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.engines import registry
from atoll.engines.linux.native_engine import NativeEngine
from atoll.manager import SandboxManager
from atoll.settings import Settings
from leftovers import leftovers
from manager.engines import TROUBLED, TroubledEngine
from manager.times import ManualClock
from needs import missing

MakeManager = Callable[..., contextlib.AbstractAsyncContextManager[SandboxManager]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Temporary, with a short path since sockets allow no long one, and other users may pass through it."""
    folder = Path(tempfile.mkdtemp(prefix="atoll-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def settings(session_settings: Settings) -> Settings:
    """One installation for all tests of this run, with nothing in it."""
    return session_settings


@pytest.fixture(scope="session", autouse=True)
def _unmounted(session_settings: Settings) -> Iterator[None]:
    yield
    if session_settings.data_dir.exists() and os.geteuid() == 0:
        asyncio.run(NativeEngine(session_settings).aclose())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Everything is tried on every engine. `make test` does it on the one that is the default."""
    if "engine_name" in metafunc.fixturenames:
        names = getattr(metafunc.module, "ENGINES", TROUBLED)
        others = [pytest.param(name, marks=pytest.mark.slow) for name in names if name != "native"]
        metafunc.parametrize("engine_name", ["native", *others])


@pytest.fixture(scope="session")
def working(session_settings: Settings) -> Callable[[str], list[str]]:
    """Why an engine does not work here, if so. Found out once."""

    @functools.cache
    def reasons(name: str) -> list[str]:
        found = registry.probe(name, session_settings, thorough=True)
        return [] if found.available else list(found.reasons)

    return reasons


@pytest.fixture
async def engine(
    engine_name: str, settings: Settings, working: Callable[[str], list[str]]
) -> AsyncIterator[TroubledEngine]:
    """A working engine, which must have nothing left when the test ends."""
    if reasons := await asyncio.to_thread(working, engine_name):
        missing("; ".join(reasons))
    engine = TROUBLED[engine_name](settings)
    yield engine
    left = leftovers(settings)
    engine.heal()
    for handle in await engine.list():
        await engine.delete(handle)
    await engine.aclose()
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
