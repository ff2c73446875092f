"""`DockerSandboxService` on a real Docker engine."""

from __future__ import annotations

import pytest

from atoll.openhands import DockerSandboxService, PresetSandboxSpecService, SandboxSpecInfo, SandboxStatus
from atoll.settings import Settings
from docker import private_engine

pytestmark = pytest.mark.timeout(private_engine.START_S)


async def test_a_life_on_docker(session_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", private_engine.host())
    spec = SandboxSpecInfo(id=private_engine.DEBIAN, command=["sleep", "1000"], working_dir="/workspace")
    async with DockerSandboxService(
        sandbox_spec_service=PresetSandboxSpecService([spec]),
        user_id="ann",
        network="none",
        max_num_sandboxes=1,
        settings=session_settings,
    ) as service:
        first = await service.start_sandbox(sandbox_id="first")
        assert (first.status, first.sandbox_spec_id) == (SandboxStatus.RUNNING, private_engine.DEBIAN)
        second = await service.start_sandbox()
        assert second.id.startswith("oh-agent-server-")
        paused, running = await service.batch_get_sandboxes(["first", second.id])
        assert paused is not None
        assert running is not None
        assert (paused.status, running.status) == (SandboxStatus.PAUSED, SandboxStatus.RUNNING)
        assert await service.resume_sandbox("first")
        assert [each.status.value for each in (await service.search_sandboxes()).items] == ["PAUSED", "RUNNING"]
        assert await service.delete_sandbox("first")
        assert await service.get_sandbox("first") is None
