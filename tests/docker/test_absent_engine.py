"""A Docker engine that is down, silent, closed to us, or restarted in between."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from atoll import AsyncSandbox, SandboxSpec, State
from atoll.engines import registry
from atoll.engines.contract import EngineDescription
from atoll.engines.docker.api import endpoint
from atoll.engines.docker.api.endpoint import Endpoint
from atoll.engines.docker.connect import agent_volume
from atoll.engines.docker.engine import DockerEngine
from atoll.errors import EngineUnavailableError, SandboxError, SandboxGoneError, SandboxPausedError
from atoll.model import Capability
from atoll.model.state import Availability
from atoll.settings import Settings
from docker import private_engine
from docker.private_engine import BUSYBOX, SCRIPT
from needs import missing, needs
from user_switch import UID


class Private:
    """An engine that a test may stop."""

    def __init__(self) -> None:
        self.host, self.folder = private_engine.start_another()
        self.where = endpoint.parse(self.host)

    @property
    def pid(self) -> int:
        return int(Path(self.folder, "pid").read_text())

    def restart(self, number: signal.Signals) -> None:
        """End it in this way and start it again."""
        pid = self.pid
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.05)
        Path(self.folder, "pid").unlink(missing_ok=True)
        with open(os.devnull, "w") as null:
            subprocess.run([SCRIPT, "start", self.folder], check=True, timeout=100, stdout=null, stderr=null)


@pytest.fixture
def private() -> Iterator[Private]:
    engine = Private()
    yield engine
    private_engine.stop_another(engine.folder)


async def test_no_engine_is_told_at_once_with_a_hint(settings: Settings, tmp_path: Path) -> None:
    engine = DockerEngine(settings, Endpoint(path=str(tmp_path / "nothing")))
    async with asyncio.timeout(5):
        for attempt in (engine.list(), AsyncSandbox(SandboxSpec(image="x"), engine=engine).create()):
            with pytest.raises(EngineUnavailableError) as caught:
                await attempt
            assert "there is no Docker engine" in caught.value.reason
            assert caught.value.hint


def test_probing_says_what_is_missing(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing")
    for thorough in (False, True):
        found = DockerEngine.probe(settings, thorough=thorough)
        assert not found.available
        assert found.reasons
        assert found.hints


def test_probing_a_working_engine(settings: Settings, docker_host: str) -> None:
    assert DockerEngine.probe(settings, thorough=False).available
    found = DockerEngine.probe(settings, thorough=True)
    assert found.available
    assert found.version
    assert "disk" in " ".join(found.reasons)
    assert "no user namespace" in " ".join(found.reasons)
    assert "docker" in registry.names()


NOT_ALLOWED = """
import asyncio, sys
from atoll.engines.docker.api.endpoint import Endpoint
from atoll.engines.docker.api.http import Http
asyncio.run(Http(Endpoint(path=sys.argv[1])).call("GET", "/info"))
"""


@needs("root")
def test_an_engine_without_permission_is_told(docker_host: str) -> None:
    switch = ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups"]
    closed = private_engine.where().path
    os.chmod(closed, 0o600)
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONDONTWRITEBYTECODE": "1"}
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        command = [*switch, "sh", "-c", 'exec "$@"', "sh", python, "-c", NOT_ALLOWED, closed]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", env=environment)
        if "EngineUnavailableError" in done.stderr:
            break
    else:
        missing("another user cannot run a Python with these packages")
    assert "EngineUnavailableError: this user may not use the Docker engine" in done.stderr


async def test_a_silent_engine_is_given_up_within_seconds(docker_host: str, settings: Settings) -> None:
    """Whatever is asked of it, and however far it was known before. What it does later is found and undone."""
    where = private_engine.where()
    engine = DockerEngine(settings, where)
    stranger = DockerEngine(settings, Endpoint(path=where.path.replace("/docker.sock", "/./docker.sock")))
    sandbox, deleted = [await AsyncSandbox(SandboxSpec(image=BUSYBOX), engine=engine).create() for _ in range(2)]
    handles = {handle.sandbox_id: handle for handle in await engine.list()}

    async def refused(attempt: Awaitable[object]) -> str:
        with pytest.raises(EngineUnavailableError) as caught:
            await attempt
        return caught.value.reason

    try:
        with private_engine.stopped():
            async with asyncio.timeout(9):
                *told, described, probed = await asyncio.gather(
                    refused(engine.list()),
                    refused(sandbox.pause()),
                    refused(engine.delete(handles[deleted.id])),
                    refused(engine.stats(handles[sandbox.id])),
                    refused(engine.create("another", SandboxSpec(image=BUSYBOX))),
                    refused(engine.pull("localhost/none")),
                    refused(engine._maker.make("none", {"Image": "x"}, agent_volume.packed(), SandboxSpec())),
                    stranger.describe(),
                    asyncio.to_thread(DockerEngine.probe, settings, thorough=False),
                )
            before = time.monotonic()
            assert Capability.MEMORY not in (await stranger.describe()).capabilities
            assert time.monotonic() - before < 1, "it is waited for again each time"
            assert (await sandbox.exec(["true"], timeout=10)).success, "the sandbox itself needs no engine"
        assert isinstance(probed, Availability)
        assert not probed.available
        assert isinstance(described, EngineDescription)
        assert Capability.MEMORY not in described.capabilities
        assert all("does not answer" in str(each) for each in told)
        await expect_paused(sandbox, str((await engine.container(sandbox.id))["Id"]))
    finally:
        await until_gone(engine)
        await asyncio.gather(sandbox.cleanup(), deleted.cleanup())
    assert not list(Path("/sys/fs/cgroup").glob(f"*/atoll-{settings.installation_id()[:12]}"))


async def expect_paused(sandbox: AsyncSandbox, container: str) -> None:
    """The engine paused it after we had given up; if this one does not, somebody else does."""
    with suppress(subprocess.CalledProcessError):
        await asyncio.to_thread(private_engine.docker, "pause", container)
    assert (await sandbox.inspect()).state is State.PAUSED
    async with asyncio.timeout(10):
        with pytest.raises(SandboxPausedError):
            await sandbox.exec(["true"], timeout=1)
    await sandbox.resume()
    assert (await sandbox.exec(["true"], timeout=10)).success
    await sandbox.pause()  # it can be deleted all the same


async def until_gone(engine: DockerEngine) -> None:
    """What the engine still does of all that it was asked for is undone."""
    async with asyncio.timeout(20):
        while handles := await engine.list():
            for handle in handles:
                await engine.delete(handle)


async def test_a_restart_is_survived(private: Private, settings: Settings) -> None:
    """The engine object goes on; sandboxes that ended with the engine say so and can be deleted."""
    engine = DockerEngine(settings, private.where)
    sandbox = await AsyncSandbox(SandboxSpec(image=BUSYBOX), engine=engine).create()
    waiting = asyncio.create_task(sandbox.exec(["sleep", "1000"], timeout=500))
    await sandbox.exec(["true"], timeout=10)
    await asyncio.to_thread(private.restart, signal.SIGTERM)
    async with asyncio.timeout(60):
        with pytest.raises((SandboxGoneError, EngineUnavailableError)):  # whether it is back when the command asks
            await waiting
        with pytest.raises(SandboxGoneError) as caught:
            await sandbox.exec(["true"], timeout=10)
    assert caught.value.cause
    seen = await sandbox.inspect()
    assert seen.state is State.STOPPED
    assert seen.cause is not None
    assert seen.reason
    async with AsyncSandbox(SandboxSpec(image=BUSYBOX), engine=engine) as another:
        assert (await another.exec(["true"], timeout=10)).success
    await sandbox.cleanup()
    assert await engine.list() == []


@pytest.mark.slow
async def test_an_engine_that_dies_takes_no_command_with_it(private: Private, settings: Settings) -> None:
    """Our stream does not go through the engine: a command goes on while it is away."""
    engine = DockerEngine(settings, private.where)
    sandbox = await AsyncSandbox(SandboxSpec(image=BUSYBOX), engine=engine).create()
    command = await sandbox.start("while [ ! -e go ]; do sleep 0.05; done; echo done")
    pid = private.pid
    os.kill(pid, signal.SIGKILL)
    await sandbox.write_file("go", "")
    assert (await command.wait()).stdout == "done\n"
    await asyncio.to_thread(private.restart, signal.SIGKILL)
    await sandbox.cleanup()
    assert await engine.list() == []


@pytest.mark.slow
async def test_an_engine_that_dies_under_a_bridged_command_is_told(private: Private, settings: Settings) -> None:
    """This stream goes through the engine: the command's caller learns at once that the engine is away."""
    engine = DockerEngine(settings, private.where, direct=False)
    sandbox = await AsyncSandbox(SandboxSpec(image=BUSYBOX), engine=engine).create()
    waiting = asyncio.create_task(sandbox.exec(["sleep", "1000"], timeout=500))
    await sandbox.exec(["true"], timeout=10)
    os.kill(private.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        with pytest.raises(EngineUnavailableError):
            await waiting
    await asyncio.to_thread(private.restart, signal.SIGKILL)
    async with AsyncSandbox(SandboxSpec(image=BUSYBOX), engine=engine) as another:
        assert (await another.exec(["true"], timeout=10)).success
    await sandbox.cleanup()
    await engine.aclose()
    assert await engine.list() == []


@pytest.mark.slow
async def test_a_full_disk_of_the_engine_is_told_and_harms_nothing(settings: Settings) -> None:
    host, folder = private_engine.start_another(disk="450m")
    try:
        engine = DockerEngine(settings, endpoint.parse(host))
        sandbox = await AsyncSandbox(SandboxSpec(image=BUSYBOX), engine=engine).create()
        filled = await sandbox.exec("dd if=/dev/zero of=big bs=1M count=900", timeout=60)
        assert "No space left" in filled.stderr
        with pytest.raises(OSError, match="No space left"):
            await sandbox.write_file("more", b"x" * 1_000_000)
        with pytest.raises(SandboxError):
            await AsyncSandbox(SandboxSpec(image=BUSYBOX), engine=engine).create()
        assert [handle.sandbox_id for handle in await engine.list()] == [sandbox.id]
        await sandbox.exec("rm big", timeout=60)
        await sandbox.write_file("more", b"x" * 1_000_000)
        async with AsyncSandbox(SandboxSpec(image=BUSYBOX), engine=engine) as another:
            assert (await another.exec(["true"], timeout=10)).success
        await sandbox.cleanup()
        assert await engine.list() == []
    finally:
        private_engine.stop_another(folder)


def test_other_engines_are_listed_without_it(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "DOCKER_HOST": f"unix://{tmp_path}/nothing",
        "ATOLL_DATA_DIR": str(tmp_path / "data"),
        "ATOLL_RUN_DIR": str(tmp_path / "run"),
    }
    command = [sys.executable, "-c", "from atoll.cli import main; main()", "ls"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0
    assert "docker: not looked at: there is no Docker engine" in done.stderr
