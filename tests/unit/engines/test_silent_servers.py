"""A Docker engine or a server that accepts connections and never answers does not hold up the event loop."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from atoll.engines.docker.api.endpoint import Endpoint
from atoll.engines.docker.engine import DockerEngine
from atoll.engines.remote.engine import RemoteEngine
from atoll.errors import SandboxError
from atoll.model import Capability, Handle, SandboxSpec
from atoll.settings import Settings

BEAT_S = 0.01
MAX_GAP_S = 0.5
WATCHED_S = 1.0


@pytest.fixture
def silent_docker(open_folder: Path) -> Iterator[Endpoint]:
    path = open_folder / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        yield Endpoint(path=str(path))


@pytest.fixture
def silent_server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


async def longest_gap_s(work: Awaitable[object]) -> float:
    """How long the event loop stood still at most while this waited for an answer that does not come."""
    gaps: list[float] = []

    async def beat() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(BEAT_S)
            gaps.append(time.monotonic() - began)

    heart = asyncio.create_task(beat())
    task = asyncio.ensure_future(work)
    await asyncio.wait({task}, timeout=WATCHED_S)
    await asyncio.sleep(2 * BEAT_S)
    assert not task.done(), "it waits for an answer"
    for each in (task, heart):
        each.cancel()
    with suppress(asyncio.CancelledError, SandboxError):
        await task
    return max(gaps)


DOCKER_USES = {
    "describe": lambda engine, handle: engine.describe(),
    "can": lambda engine, handle: engine.can(Capability.PAUSE),
    "create": lambda engine, handle: engine.create("silent", handle.spec),
    "list": lambda engine, handle: engine.list(),
    "inspect": lambda engine, handle: engine.inspect(handle),
    "default_limits": lambda engine, handle: engine.default_limits(handle.spec),
}


@pytest.mark.parametrize("use", list(DOCKER_USES))
async def test_the_first_use_of_a_silent_docker_engine(use: str, settings: Settings, silent_docker: Endpoint) -> None:
    engine = DockerEngine(settings, silent_docker)
    handle = Handle("docker", "silent", SandboxSpec(), 0.0)
    assert await longest_gap_s(DOCKER_USES[use](engine, handle)) < MAX_GAP_S
    await engine.aclose()


REMOTE_USES = {
    "describe": lambda engine, handle: engine.describe(),
    "list": lambda engine, handle: engine.list(),
    "inspect": lambda engine, handle: engine.inspect(handle),
    "connect": lambda engine, handle: engine.connect(handle),
    "stats": lambda engine, handle: engine.stats(handle),
}


@pytest.mark.parametrize("use", list(REMOTE_USES))
async def test_the_first_use_of_a_silent_server(use: str, settings: Settings, silent_server: str) -> None:
    engine = RemoteEngine(settings, url=silent_server, api_key="none")
    handle = Handle("remote", "silent", SandboxSpec(), 0.0, {"remote_id": "silent"})
    assert await longest_gap_s(REMOTE_USES[use](engine, handle)) < MAX_GAP_S
    await engine.aclose()
