"""What is special to the `docker` engine, on a real Docker engine."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import time
from pathlib import Path

import pytest

from atoll import Cause, State
from atoll.engines.contract import Engine, Pausable
from atoll.engines.docker import container_plan
from atoll.engines.docker.api import image_pull
from atoll.engines.docker.api.image_pull import Progress
from atoll.engines.docker.connect import agent_volume
from atoll.engines.docker.engine import DockerEngine
from atoll.errors import (
    EngineError,
    ImageNotFoundError,
    SandboxGoneError,
    SpecError,
)
from atoll.model import Handle
from atoll.settings import Settings
from docker.containers import handle_of, new, spec
from docker.private_engine import BUSYBOX, DEBIAN, STATIC, docker, where
from unit.images.registries import registry


async def until_ended(engine: DockerEngine, handle: Handle) -> None:
    async with asyncio.timeout(20):
        while (await engine.inspect(handle)).state is State.RUNNING:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_it_is_an_engine_that_can_pause(settings: Settings, docker_host: str) -> None:
    engine = DockerEngine(settings)
    assert isinstance(engine, Engine)
    assert isinstance(engine, Pausable)


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("image", [DEBIAN, BUSYBOX, STATIC])
async def test_any_image_works_with_nothing_in_it(
    settings: Settings, docker_host: str, direct: bool, image: str
) -> None:
    engine = DockerEngine(settings, where(), direct=direct)
    async with new(engine, image) as sandbox:
        program = ["/hello", "3"] if image == STATIC else ["sh", "-c", "echo hello; exit 3"]
        result = await sandbox.exec(program, timeout=20)
        assert (result.stdout, result.exit_code) == ("hello\n", 3)
        await sandbox.write_file("deep/er/file", "content")
        assert await sandbox.read_file("deep/er/file") == "content"
    await engine.aclose()


async def test_an_image_without_a_shell_says_so(engine: DockerEngine) -> None:
    async with new(engine, STATIC) as sandbox:
        result = await sandbox.exec("echo hi", timeout=20)
        assert result.exit_code == 127
        assert "sh" in result.stderr


async def test_a_missing_image_is_pulled_with_progress(engine: DockerEngine, tmp_path: Path) -> None:
    with registry(tmp_path / "registry") as address:
        name = f"{address}/team/box:one"
        docker("tag", BUSYBOX, name)
        docker("push", "-q", name)
        docker("rmi", name)
        seen: list[Progress] = []
        await engine.pull(name, seen.append)
        assert any(step.total_bytes > 0 or "Already exists" in step.status for step in seen) or seen[-1].status
        assert "Status:" in seen[-1].status
        docker("rmi", name)
        async with new(engine, name) as sandbox:
            assert (await sandbox.exec(["true"], timeout=10)).success
        docker("rmi", name)


async def test_an_image_that_is_nowhere_is_told(engine: DockerEngine, tmp_path: Path) -> None:
    with registry(tmp_path / "registry") as address:
        with pytest.raises(ImageNotFoundError, match="there is no image") as caught:
            await new(engine, f"{address}/no/such:image").create()
        assert caught.value.hint


async def test_a_registry_that_is_away_is_told_as_such(engine: DockerEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with asyncio.timeout(60):
        with pytest.raises(ImageNotFoundError, match="registry cannot be reached") as caught:
            await new(engine, f"127.0.0.1:{port}/x:y").create()
    assert "docker pull" in str(caught.value.hint)


async def test_a_registry_that_is_silent_is_given_up(engine: DockerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_pull, "_STALL_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(ImageNotFoundError, match="sent nothing"):
            await new(engine, f"127.0.0.1:{silent.getsockname()[1]}/x:y").create()


async def test_a_pull_can_be_cancelled(engine: DockerEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sandbox = new(engine, f"127.0.0.1:{silent.getsockname()[1]}/x:y")
        task = asyncio.create_task(sandbox.create())
        await asyncio.sleep(0.3)
        task.cancel()
        async with asyncio.timeout(5):
            await asyncio.wait([task])
        assert task.cancelled()


@pytest.mark.parametrize("name", ["UPPER/../x", "a b", "x//y", "-x", "x?y=z"])
async def test_what_is_no_image_of_a_registry_is_refused(engine: DockerEngine, name: str) -> None:
    with pytest.raises((SpecError, ImageNotFoundError)) as caught:
        await new(engine, name).create()
    assert caught.value.hint


# --- life -------------------------------------------------------------------------------------------------------------


async def test_the_cause_of_an_end_is_kept(engine: DockerEngine) -> None:
    async with new(engine, limits={"memory_bytes": "32m"}) as sandbox:
        handle = await handle_of(engine, sandbox)
        pid = int((await engine.container(sandbox.id))["State"]["Pid"])
        os.kill(pid, signal.SIGKILL)
        await until_ended(engine, handle)
        seen = await engine.inspect(handle)
        assert (seen.state, seen.cause) == (State.STOPPED, Cause.KILLED)
        assert "SIGKILL" in seen.reason
        with pytest.raises(SandboxGoneError) as caught:
            await engine.connect(handle)
        assert caught.value.cause == Cause.KILLED


async def test_a_lifetime_ends_it_whether_anybody_watches_or_not(engine: DockerEngine) -> None:
    sandbox = await new(engine, BUSYBOX, limits={"lifetime_s": 1.5}).create()
    handle = await handle_of(engine, sandbox)
    await sandbox.start(["sleep", "1000"])
    await sandbox.detach()
    docker("wait", handle.details["container"])
    seen = await engine.inspect(handle)
    assert (seen.state, seen.cause) == (State.STOPPED, Cause.TIMEOUT)
    assert "lifetime" in seen.reason
    with pytest.raises(SandboxGoneError) as caught:
        await engine.connect(handle)
    assert caught.value.cause == Cause.TIMEOUT
    await engine.delete(handle)


async def test_a_lifetime_that_passes_during_a_pause_counts(engine: DockerEngine) -> None:
    async with new(engine, BUSYBOX, limits={"lifetime_s": 2}) as sandbox:
        handle = await handle_of(engine, sandbox)
        await engine.pause(handle)
        async with asyncio.timeout(20):
            while (seen := await engine.inspect(handle)).state is State.PAUSED:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (seen.state, seen.cause) == (State.STOPPED, Cause.TIMEOUT)


async def test_a_container_removed_by_somebody_else_is_missing(engine: DockerEngine) -> None:
    async with new(engine) as sandbox:
        handle = await handle_of(engine, sandbox)
        docker("rm", "-f", handle.details["container"])
        assert (await engine.inspect(handle)).state is State.MISSING
        with pytest.raises(SandboxGoneError):
            await sandbox.exec("true", timeout=5)


async def test_memory_that_a_command_ran_out_of_is_known(engine: DockerEngine) -> None:
    async with new(engine, limits={"memory_bytes": "48m"}) as sandbox:
        since = time.time()
        assert not await engine.ran_out_of_memory(sandbox.id, since)
        result = await sandbox.exec(["python3", "-c", "bytearray(200 << 20)"], timeout=30)
        assert result.exit_code == 137
        assert await engine.ran_out_of_memory(sandbox.id, since)
        assert not await engine.ran_out_of_memory(sandbox.id, time.time())
        assert (await sandbox.exec("echo on", timeout=10)).stdout == "on\n"


async def test_a_limit_that_a_command_hit_is_its_cause(settings: Settings, docker_host: str, direct: bool) -> None:
    engine = DockerEngine(settings, where(), direct=direct)
    hungry = ["python3", "-c", "bytearray(200 << 20)"]
    async with new(engine, limits={"memory_bytes": "48m", "pids": 30}) as sandbox:
        for command in (hungry, f"{shlex.join(hungry)}; exit $?", hungry):
            assert (await sandbox.exec(command, timeout=30)).cause is Cause.OUT_OF_MEMORY
        assert (await sandbox.exec("exit 3", timeout=10)).cause is Cause.EXIT
        assert (await sandbox.exec("kill -9 $$", timeout=10)).cause is Cause.SIGNAL
        if direct:
            many = "import os, time\nwhile True:\n    os.fork() or time.sleep(100)"
            assert (await sandbox.exec(["python3", "-c", many], timeout=20)).cause is Cause.PIDS
    await engine.aclose()


async def test_only_what_is_ours_is_listed(engine: DockerEngine, tmp_path: Path) -> None:
    stranger = docker("create", "--label", f"{container_plan.SANDBOX}=abc", BUSYBOX, "true")
    other = DockerEngine(Settings(tmp_path / "other", tmp_path / "run"), where())
    try:
        async with new(engine) as mine, new(other) as theirs:
            assert [handle.sandbox_id for handle in await engine.list()] == [mine.id]
            assert [handle.sandbox_id for handle in await other.list()] == [theirs.id]
    finally:
        docker("rm", stranger)


async def test_damaged_labels_are_listed_so_that_they_can_be_deleted(engine: DockerEngine, settings: Settings) -> None:
    name = container_plan.identity(settings.installation_id(), "broken").container
    labels = [
        f"{container_plan.INSTALLATION}={settings.installation_id()}",
        f"{container_plan.SANDBOX}=broken",
        f"{container_plan.SPEC}=not json",
    ]
    docker("create", "--name", name, *(word for label in labels for word in ("--label", label)), BUSYBOX, "true")
    (handle,) = await engine.list()
    assert handle.sandbox_id == "broken"
    assert "damaged" in handle.details
    await engine.delete(handle)
    assert await engine.list() == []


async def test_pausing_and_deleting_in_any_order(engine: DockerEngine) -> None:
    sandbox = await new(engine).create()
    handle = await handle_of(engine, sandbox)
    await engine.pause(handle)
    await engine.pause(handle)
    assert (await engine.inspect(handle)).state is State.PAUSED
    await engine.resume(handle)
    await engine.resume(handle)
    await engine.pause(handle)
    async with asyncio.timeout(20):
        await sandbox.cleanup()
    assert (await engine.inspect(handle)).state is State.MISSING


async def test_anonymous_volumes_of_an_image_go_with_the_sandbox(engine: DockerEngine) -> None:
    image = docker("commit", "--change", "VOLUME /data", docker("create", BUSYBOX, "true"))
    docker("tag", image, "atoll-test:volume")
    before = set(docker("volume", "ls", "-q").split())
    async with new(engine, "atoll-test:volume") as sandbox:
        await sandbox.write_file("/data/file", "x")
        assert set(docker("volume", "ls", "-q").split()) - before - {agent_volume.packed().volume}
    assert set(docker("volume", "ls", "-q").split()) - {agent_volume.packed().volume} <= before


async def test_what_the_image_would_run_does_not_run(engine: DockerEngine) -> None:
    changes = ["USER nobody", 'ENTRYPOINT ["false"]', "HEALTHCHECK CMD false", "ENV FROM_IMAGE=1 LANG=en_US"]
    words = [word for change in changes for word in ("--change", change)]
    docker("tag", docker("commit", *words, docker("create", BUSYBOX, "true")), "atoll-test:odd")
    async with new(engine, "atoll-test:odd") as sandbox:
        shown = await sandbox.exec("id -u; echo $FROM_IMAGE $LANG", timeout=10)
        assert shown.stdout == "65534\n1 en_US\n"
        assert "Health" not in (await engine.container(sandbox.id))["State"]


async def test_a_removed_agent_volume_is_made_again(engine: DockerEngine) -> None:
    async with new(engine, BUSYBOX):
        pass
    docker("volume", "rm", agent_volume.packed().volume)
    async with new(engine, BUSYBOX) as sandbox:
        assert (await sandbox.exec(["true"], timeout=10)).success


async def test_several_first_sandboxes_fill_the_volume_once(engine: DockerEngine) -> None:
    agent_volume._complete.clear()
    docker("volume", "rm", "-f", agent_volume.packed().volume)

    async def use() -> bool:
        async with new(engine, BUSYBOX) as sandbox:
            return (await sandbox.exec(["true"], timeout=20)).success

    assert all(await asyncio.gather(*(use() for _ in range(5))))
    assert agent_volume.packed().volume not in docker("ps", "-a", "--format", "{{.Names}}")


async def test_a_filler_that_somebody_left_is_removed(engine: DockerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_volume, "_WAIT_S", 0.5)
    agent_volume._complete.clear()
    docker("create", "--name", agent_volume.packed().volume, BUSYBOX, "true")
    async with new(engine, BUSYBOX) as sandbox:
        assert (await sandbox.exec(["true"], timeout=10)).success


async def test_a_sandbox_of_a_bridge_ends_with_its_event_loop_and_is_reached_again(
    settings: Settings, docker_host: str
) -> None:
    engine = DockerEngine(settings, where(), direct=False)
    sandbox = new(engine)

    async def first() -> None:
        await sandbox.create()
        await sandbox.run_command("x=kept", 20)

    async def second() -> str:
        return await sandbox.run_command("echo $x", 20)

    async def last() -> None:
        await sandbox.cleanup()
        await engine.aclose()

    await asyncio.to_thread(asyncio.run, first())
    assert await asyncio.to_thread(asyncio.run, second()) == "kept"
    await asyncio.to_thread(asyncio.run, last())


async def test_a_failed_start_leaves_no_container(engine: DockerEngine) -> None:
    with pytest.raises((EngineError, SpecError)):
        await new(engine, work_dir="/bin/sh").create()
    assert await engine.list() == []


async def test_figures_are_plausible(engine: DockerEngine) -> None:
    async with new(engine) as sandbox:
        stats = await sandbox.stats()
        assert stats.memory_bytes is not None
        assert 0 < stats.memory_bytes < 64 << 20
        assert stats.pids is not None
        assert stats.pids >= 1


def test_labels_are_json(settings: Settings) -> None:
    assert json.loads(spec().model_dump_json())["image"] == DEBIAN
