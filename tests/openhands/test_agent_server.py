"""OpenHands's real agent server, unmodified, in a sandbox of `ProcessSandboxService`, as its own service starts it.

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
from needs import not_applicable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
VARIABLES = {
    "OH_ENABLE_VNC": "0",
    "OH_ENABLE_VSCODE": "0",
    "OH_CONVERSATIONS_PATH": "/workspace/conversations",
    "OH_BASH_EVENTS_DIR": "/workspace/bash_events",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def environment_of(python: str, folder: Path) -> list[VolumeMount]:
    """The environment and the Python that it was made with, which a sandbox's own user may not be able to reach."""
    ask = "import sys; print(sys.prefix, sys.base_prefix)"
    prefix, base = subprocess.check_output([python, "-c", ask], text=True).split()
    copy = folder / "python"
    if not copy.exists():
        shutil.copytree(base, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "test"))
    return [
        VolumeMount(host_path=prefix, container_path=prefix, mode="ro"),
        VolumeMount(host_path=str(copy), container_path=base, mode="ro"),
    ]


async def test_it_serves_those_who_have_the_key(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> None:
    python = os.environ.get("ATOLL_TEST_OPENHANDS")
    if not python:
        not_applicable("ATOLL_TEST_OPENHANDS names no Python that has openhands-ai")
    need_engine("process", session_settings)
    command = [python, "-m", "openhands.agent_server", "--host", "127.0.0.1", "--port", "8000"]
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
