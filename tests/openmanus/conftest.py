"""Programs written for OpenManus, on a real Docker engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from atoll.openmanus import DockerSandbox, SandboxSettings
from docker import private_engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    private_engine.give_time_to_start(items, Path(__file__).parent)


def pytest_sessionfinish() -> None:
    private_engine.stop()


@pytest.fixture(scope="session", autouse=True)
def installation(session_folder: Path) -> None:
    """Everything of these tests belongs to one installation, in this process's environment as a user would have it."""
    patch = pytest.MonkeyPatch()
    patch.setenv("DOCKER_HOST", private_engine.host())
    patch.setenv("ATOLL_DATA_DIR", str(session_folder / "openmanus" / "data"))
    patch.setenv("ATOLL_RUN_DIR", str(session_folder / "openmanus" / "run"))


@pytest.fixture(scope="session")
def config() -> SandboxSettings:
    return SandboxSettings(image=private_engine.DEBIAN, memory_limit="256m", timeout=60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(config: SandboxSettings) -> AsyncIterator[DockerSandbox]:
    """Made in one event loop, used by each test in another."""
    async with DockerSandbox(config) as sandbox:
        yield sandbox
