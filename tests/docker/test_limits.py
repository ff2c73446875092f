"""Limits that nobody asked for, on a real Docker engine: of each container, and of all containers of an account."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.engines.docker import container_plan
from atoll.engines.docker.api import facts
from atoll.engines.docker.connect.agent_volume import Agent
from atoll.engines.docker.engine import DockerEngine
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.model import Limits, SandboxSpec
from atoll.resources import Ceilings, Resources
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from docker import private_engine
from docker.test_plan import IMAGE, INFO, WHO
from needs import not_applicable

MIB = 1 << 20
SMALL = Resources(
    sandbox=Limits(memory_bytes=96 * MIB, pids=40, cpus=1, disk_bytes=64 * MIB, open_files=128),
    account=Ceilings(memory_bytes=160 * MIB, pids=60, cpu_weight=50),
    installation=Ceilings(memory_bytes=300 * MIB, pids=100),
)


@pytest.fixture
async def limited(settings: Settings, docker_host: str) -> AsyncIterator[DockerEngine]:
    engine = DockerEngine(replace(settings, resources=SMALL), private_engine.where())
    yield engine
    for handle in await engine.list():
        await engine.delete(handle)
    await engine.aclose()
    assert not _group(engine, "pids").exists()


def _group(engine: DockerEngine, controller: str) -> Path:
    top = f"atoll-{engine._settings.installation_id()[:12]}"
    return Hierarchy.find().controllers[controller] / top


async def test_a_container_that_asks_for_no_limit_has_one(limited: DockerEngine) -> None:
    if not await limited.shared_ceilings():
        not_applicable("this Docker engine makes control groups elsewhere")
    spec = SandboxSpec.of(image=private_engine.DEBIAN, account="aaa", limits={"cpus": 0.5})
    async with AsyncSandbox(spec, engine=limited) as sandbox:
        (handle,) = await limited.list()
        host = (await limited.container(sandbox.id))["HostConfig"]
        assert (host["Memory"], host["PidsLimit"], host["NanoCpus"]) == (96 * MIB, 40, 500_000_000)
        assert (await sandbox.exec("ulimit -n", timeout=20)).stdout == "128\n"
        found = await sandbox.info()
        assert found.limits == handle.limits().limits
        assert (found.limits.memory_bytes, found.limits.cpus) == (96 * MIB, 0.5)
        assert found.limits_left_out == ("disk_bytes",)
        account = _group(limited, "pids") / "@aaa"
        assert (account / "pids.max").read_text() == "60\n"
        assert [entry for entry in account.iterdir() if entry.is_dir()]
        assert (account.parent / "pids.max").read_text() == "100\n"
        await sandbox.restart()
        assert (await limited.container(sandbox.id))["HostConfig"]["PidsLimit"] == 40


def test_defaults_are_never_more_than_the_machine_has() -> None:
    known = facts.parse({**INFO, "NCPU": 1, "MemTotal": 64 * MIB})
    wanted = SMALL.sandbox.model_copy(update={"cpus": 8.0})
    found = known.defaults(wanted, SandboxSpec(image="x"))
    assert (found.limits.cpus, found.limits.memory_bytes) == (1.0, 64 * MIB)
    body = container_plan.container(
        WHO, SandboxSpec(image="x"), known, IMAGE, Agent("d" * 64, b""), 1.5, defaults=found, cgroup_parent="/a/@b"
    )
    assert body["HostConfig"]["NanoCpus"] == 1_000_000_000
    assert body["HostConfig"]["CgroupParent"] == "/a/@b"
    assert container_plan.defaults_of(body["Labels"]) == found
    assert SandboxSpec.model_validate_json(body["Labels"][container_plan.SPEC]).limits == Limits()
