"""OpenHands's real agent server, unmodified, in sandboxes: started by our service, and by its own remote back end.

It runs where ATOLL_TEST_OPENHANDS names the Python of an environment in which `openhands-ai` is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from atoll.openhands import (
    PresetSandboxSpecService,
    ProcessSandboxService,
    SandboxSpecInfo,
    SandboxStatus,
    VolumeMount,
)
from atoll.settings import Settings
from needs import need, not_applicable
from openhands.test_upstream import drive
from server.running import running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SERVER = ["/opt/python/bin/python3", "-m", "openhands.agent_server", "--host", "127.0.0.1", "--port"]
VARIABLES = {
    "PYTHONPATH": "/opt/packages",
    "LD_LIBRARY_PATH": "/opt/python/lib",
    "OH_ENABLE_VNC": "0",
    "OH_ENABLE_VSCODE": "0",
    "OH_CONVERSATIONS_PATH": "/workspace/conversations",
    "OH_BASH_EVENTS_DIR": "/workspace/bash_events",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def environment_of(python: str, folder: Path) -> list[VolumeMount]:
    """Its packages, and the Python that it was made with, which a sandbox's own user may not be able to reach."""
    ask = "import sys, sysconfig; print(sysconfig.get_path('purelib'), sys.base_prefix)"
    packages, base = subprocess.check_output([python, "-c", ask], text=True).split()
    copy = folder / "python"
    if not copy.exists():
        shutil.copytree(base, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "test"))
    return [
        VolumeMount(host_path=packages, container_path="/opt/packages", mode="ro"),
        VolumeMount(host_path=str(copy), container_path="/opt/python", mode="ro"),
    ]


async def test_it_serves_those_who_have_the_key(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> None:
    python = os.environ.get("ATOLL_TEST_OPENHANDS")
    if not python:
        not_applicable("ATOLL_TEST_OPENHANDS names no Python that has openhands-ai")
    need_engine("bubblewrap", session_settings)
    command = [*SERVER, "8000"]
    spec = SandboxSpecInfo(id="host", command=command, initial_env=VARIABLES, working_dir="/workspace")
    async with (
        ProcessSandboxService(
            user_id="ann",
            sandbox_spec_service=PresetSandboxSpecService([spec]),
            mounts=environment_of(python, session_folder),
            health_check_path="/health",
            startup_grace_seconds=150,
            settings=session_settings,
        ) as service,
        httpx.AsyncClient(trust_env=False, verify=False, timeout=30) as client,
    ):
        assert (await service.start_sandbox(sandbox_id="it")).status is SandboxStatus.STARTING
        info = await service.wait_for_sandbox_running("it", 150, 0.2, client)
        assert info.exposed_urls is not None
        url, key = info.exposed_urls[0].url, info.session_api_key
        assert key is not None
        for wrong in ({}, {"X-Session-API-Key": "wrong"}):
            assert (await client.get(f"{url}/api/conversations/search", headers=wrong)).status_code == 401
        client.headers["X-Session-API-Key"] = key
        assert (await client.get(f"{url}/api/conversations/search")).json()["items"] == []
        run = {"command": "echo by $(id -un) in $PWD"}
        done = (await client.post(f"{url}/api/bash/execute_bash_command", json=run)).json()
        assert (done["exit_code"], done["stdout"]) == (0, "by user in /workspace\n")
        assert await service.pause_sandbox("it")
        assert await service.resume_sandbox("it")
        after = await service.wait_for_sandbox_running("it", 30, 0.2, client)
        assert after.exposed_urls is not None
        found = await client.get(f"{after.exposed_urls[0].url}/api/conversations/search")
        assert found.status_code == 200, "it goes on, with the same key"


def test_it_serves_behind_the_runtime_api(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> None:
    python = os.environ.get("ATOLL_TEST_OPENHANDS")
    if not python:
        not_applicable("ATOLL_TEST_OPENHANDS names no Python that has openhands-ai")
    need("root")
    need_engine("native", session_settings)
    volumes = [
        {"host": each.host_path, "path": each.container_path, "read_only": True}
        for each in environment_of(python, session_folder)
    ]
    command = [*SERVER, "60000"]
    settings = {"volumes": volumes, "env": {**VARIABLES, "HOME": "/workspace"}}
    with running_server(session_folder / "agent-server", "native") as server, server.client() as admin:
        spec = {"id": "agent", "settings": settings, "command": command, "shared": True}
        assert admin.post("/sandbox-specs", json=spec).status_code == 201
        assert server.key is not None
        said = drive(python, session_folder, server.url, server.key)
    assert said["agent"]["status"] == "RUNNING"
    assert [each[0] for each in said["conversations"]] == [401, 401, 200]
    assert said["conversations"][2][1] == {"items": [], "next_page_id": None}
    assert said["again"] == [True, True]
    assert said["conversations after"][0] == 200
    assert said["deleted"]
