"""What tests of every kind may ask for."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.engines import registry
from atoll.settings import Settings

NeedEngine = Callable[[str, Settings], None]


@pytest.fixture(scope="session")
def need_engine() -> NeedEngine:
    """`need_engine(name, settings)` goes on if that engine works here: else a skip on a laptop, a failure in CI."""

    def need(name: str, settings: Settings) -> None:
        found = registry.probe(name, settings, thorough=True)
        if not found.available:
            explain = pytest.fail if os.environ.get("CI") else pytest.skip
            explain(f"engine '{name}': {'; '.join(found.reasons)}")

    return need


@pytest.fixture(scope="session")
def session_folder() -> Iterator[Path]:
    """Temporary, with a short path since sockets allow no long one, and other users may pass through it."""
    folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def session_settings(session_folder: Path) -> Settings:
    """An installation that belongs to this run of the tests."""
    return Settings(data_dir=session_folder / "data", run_dir=session_folder / "run")
