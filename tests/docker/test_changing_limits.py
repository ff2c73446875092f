"""Limits of a container that are changed while it runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.engines.docker.engine import DockerEngine
from atoll.errors import SandboxResourceError, SpecError, UnsupportedError
from atoll.model import SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from docker import private_engine

MIB = 1 << 20


def spec() -> SandboxSpec:
    return SandboxSpec.of(image=private_engine.DEBIAN, limits={"memory_bytes": 96 * MIB, "pids": 40, "cpus": 0.5})


async def in_force(engine: DockerEngine, box: AsyncSandbox) -> tuple[int, int, int]:
    host = (await engine.container(box.id))["HostConfig"]
    return host["Memory"], host["PidsLimit"], host["NanoCpus"]


async def test_limits_change_and_last_for_the_life_of_the_sandbox(engine: DockerEngine) -> None:
    async with AsyncSandbox(spec(), engine=engine) as box:
        take = "head -c 150m /dev/zero | tail -c 150m | wc -c"
        assert (await box.exec(take, timeout=30)).stdout == "0\n"
        found = await box.set_limits(memory="300m", pids=60)
        assert (found.limits.memory_bytes, found.limits.pids, found.limits.cpus) == (300 * MIB, 60, 0.5)
        assert (await box.exec(take, timeout=30)).stdout == f"{150 * MIB}\n"
        assert await in_force(engine, box) == (300 * MIB, 60, 500_000_000)
        await box.restart()
        assert await in_force(engine, box) == (300 * MIB, 60, 500_000_000)
        (listed,) = await engine.list()
        assert listed.spec.limits.memory_bytes == 300 * MIB
        (fork,) = await box.fork()
        async with fork:
            assert await in_force(engine, fork) == (300 * MIB, 60, 500_000_000)
    assert engine._limits.ids() == []


async def test_what_cannot_be_changed_is_refused_and_changes_nothing(engine: DockerEngine) -> None:
    async with AsyncSandbox(spec(), engine=engine) as box:
        with pytest.raises(UnsupportedError, match="cannot change disk_bytes"):
            await box.set_limits(disk="100m", pids=60)
        await box.start("sleep 100 & sleep 100 & sleep 100 & wait")
        with pytest.raises(SandboxResourceError, match="more than the new limit"):
            await box.set_limits(pids=2, memory="200m")
        with pytest.raises(SpecError, match="cannot change the limits"):
            await box.set_limits(cpus=4000, memory="200m")
        assert await in_force(engine, box) == (96 * MIB, 40, 500_000_000)
        assert (await engine.list())[0].spec.limits.memory_bytes == 96 * MIB


async def test_a_change_whose_process_died_is_what_the_docker_engine_says(engine: DockerEngine) -> None:
    async with AsyncSandbox(spec(), engine=engine) as box:
        (handle,) = await engine.list()
        before = handle.spec.limits
        after = before.model_copy(update={"pids": 60})
        engine._limits.write(box.id, after, before)  # it died before the Docker engine was asked
        await engine.inspect(handle)
        assert (await engine.list())[0].spec.limits == before
        await engine.set_limits(handle, after)
        engine._limits.write(box.id, after, before)  # it died after that
        await engine.inspect(replace(handle, details={}))
        assert (await engine.list())[0].spec.limits == after
