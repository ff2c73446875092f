"""A sandbox that names no image: the engine's default one, wherever it is asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import AsyncSandbox, Sandbox
from atoll.engines.docker.engine import DockerEngine
from atoll.openmanus import SandboxManager
from atoll.settings import Settings
from docker.private_engine import BUSYBOX, DEBIAN, docker
from server.running import running_server

DEFAULT = "python:3.12-slim"


@pytest.fixture
def default_image(docker_host: str) -> Iterator[str]:
    """As if it had been pulled."""
    docker("tag", DEBIAN, DEFAULT)
    yield DEFAULT
    docker("rmi", DEFAULT)


def test_a_sandbox(settings: Settings, default_image: str) -> None:
    with Sandbox(engine="docker", settings=settings) as sandbox:
        assert sandbox.exec(["python3", "-c", "print(1)"]).stdout == "1\n"
        assert sandbox.spec.image == default_image


async def test_openmanus_and_its_record(settings: Settings, default_image: str) -> None:
    async with SandboxManager(settings=settings) as manager:
        sandbox_id = await manager.create_sandbox()
        assert await (await manager.get_sandbox(sandbox_id)).run_command("echo there") == "there"
        assert (await manager.describe(sandbox_id)).spec.image == default_image
        assert await manager.ensure_image("host")


def test_a_server(tmp_path: Path, default_image: str, docker_host: str) -> None:
    with running_server(tmp_path, "docker", DOCKER_HOST=docker_host) as server, server.client() as client:
        deadline = time.monotonic() + 20
        while (spec := client.get("/sandbox-specs/default").json())["image_status"] != "ready":
            assert time.monotonic() < deadline, spec
        assert spec["image"] == default_image
        made = client.post("/sandboxes", json={}).json()
        assert made["image"] == default_image
        said = client.post(f"/sandboxes/{made['id']}/exec", json={"command": "echo there"}).json()
        assert said["stdout"] == "there\n"


async def test_it_is_a_setting(settings: Settings, docker_host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_DOCKER_IMAGE", BUSYBOX)
    engine = DockerEngine(Settings(settings.data_dir, settings.run_dir, docker_image=Settings.load().docker_image))
    async with AsyncSandbox(engine=engine) as sandbox:
        assert (await sandbox.exec("busybox true")).success
        assert [handle.spec.image for handle in await engine.list()] == [BUSYBOX]
    await engine.aclose()
