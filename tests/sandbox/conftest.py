"""Sandboxes of the simplest engine: what is tested here is the same for every engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from atoll import AsyncSandbox, Sandbox
from atoll.settings import Settings

ENGINE = "bubblewrap"


@pytest.fixture
def settings(session_settings: Settings, need_engine: Callable[[str, Settings], None]) -> Settings:
    """Those of this run, where the engine works."""
    need_engine(ENGINE, session_settings)
    return session_settings


@pytest.fixture
async def sandbox(settings: Settings) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandbox(engine=ENGINE, settings=settings, timeout=30) as sandbox:
        yield sandbox


@pytest.fixture
def sync_sandbox(settings: Settings) -> Iterator[Sandbox]:
    with Sandbox(engine=ENGINE, settings=settings, timeout=30) as sandbox:
        yield sandbox


@pytest.fixture
def other_python(settings: Settings) -> dict[str, str]:
    """The environment for another Python process that uses the same settings."""
    return {
        "ATOLL_DATA_DIR": str(settings.data_dir),
        "ATOLL_RUN_DIR": str(settings.run_dir),
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
    }
