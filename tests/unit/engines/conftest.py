from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.engines.bubblewrap.engine import BubblewrapEngine
from atoll.settings import Settings
from leftovers import leftovers
from needs import missing


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Temporary, with a short path since sockets allow no long one, and other users may pass through it."""
    folder = Path(tempfile.mkdtemp(prefix="atoll-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def settings(open_folder: Path) -> Settings:
    return Settings(data_dir=open_folder / "data", run_dir=open_folder / "run")


@pytest.fixture
def engine(settings: Settings) -> Iterator[BubblewrapEngine]:
    """A working engine, which must have nothing left when the test ends."""
    found = BubblewrapEngine.probe(settings, thorough=True)
    if not found.available:
        missing("; ".join(found.reasons))
    engine = BubblewrapEngine(settings)
    yield engine
    left = leftovers(settings)
    asyncio.run(_delete_all(engine))
    assert left == []


async def _delete_all(engine: BubblewrapEngine) -> None:
    for handle in await engine.list():
        await engine.delete(handle)
