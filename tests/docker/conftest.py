"""Tests of the `docker` engine on a real Docker engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.engines.docker.engine import DockerEngine
from atoll.settings import Settings
from docker import private_engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    private_engine.give_time_to_start(items, Path(__file__).parent)


def pytest_sessionfinish() -> None:
    private_engine.stop()


@pytest.fixture
def docker_host(monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine under test, also for processes that a test starts."""
    monkeypatch.setenv("DOCKER_HOST", private_engine.host())
    return private_engine.host()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """An installation of its own for each test."""
    return Settings(data_dir=tmp_path / "data", run_dir=tmp_path / "run")


@pytest.fixture(params=["direct", "bridged"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Both ways to reach an agent."""
    return bool(request.param == "direct")


@pytest.fixture
async def engine(settings: Settings, docker_host: str) -> AsyncIterator[DockerEngine]:
    """It must have nothing left when the test ends."""
    engine = DockerEngine(settings, private_engine.where())
    yield engine
    left = await engine.list()
    for handle in left:
        await engine.delete(handle)
    await engine.aclose()
    assert left == []


@pytest.fixture(autouse=True)
def no_docker_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing that this user has configured for Docker counts."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker-config"))
    for name in ("DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
