"""A real server, and the engine that uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.settings import Settings
from server.running import RunningServer, running_server


@pytest.fixture(scope="session", params=["process", pytest.param("native", marks=pytest.mark.slow)])
def server(
    request: pytest.FixtureRequest,
    session_folder: Path,
    session_settings: Settings,
    need_engine: Callable[[str, Settings], None],
) -> Iterator[RunningServer]:
    """On each of two engines: the one that needs least, and the one that can do most."""
    need_engine(request.param, session_settings)
    with running_server(session_folder / f"far-{request.param}", request.param) as running:
        yield running


@pytest.fixture
def environment(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user sets it."""
    monkeypatch.setenv("ATOLL_URL", server.url)
    assert server.key is not None
    monkeypatch.setenv("ATOLL_API_KEY", server.key)
