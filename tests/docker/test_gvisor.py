"""A Docker engine that has gVisor's runtime: the agent runs under another kernel and is reached through the API."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import AsyncSandbox, SandboxSpec, State
from atoll.conformance import CHECKS, Bench, Check, Outcome, run_one
from atoll.engines.docker.api import endpoint
from atoll.engines.docker.engine import DockerEngine
from atoll.settings import Settings
from docker import private_engine
from docker.private_engine import DEBIAN, SCRIPT
from docker.test_conformance import BRIDGED
from needs import missing, not_applicable
from promises import group_of, groups

pytestmark = pytest.mark.slow
PLACES = ("/var/lib/atoll/programs/runsc", "/usr/local/bin/runsc")


@pytest.fixture(scope="module")
def runsc(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without a network of its own, which is all that sandboxes have anyway, and works on every kernel."""
    folder = tmp_path_factory.mktemp("runsc")
    found = next((path for path in PLACES if os.access(path, os.X_OK)), None) or shutil.which("runsc")
    if found is None:
        done = subprocess.run([SCRIPT.with_name("get-runsc"), folder], capture_output=True, text=True, timeout=300)
        found = str(folder / "runsc")
        if done.returncode != 0:
            missing(f"there is no runsc: {done.stderr.strip()[-200:]}")
    wrapper = folder / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {found} --network=none "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


@pytest.fixture(scope="module")
def host(runsc: str) -> Iterator[str]:
    host, folder = private_engine.start_another(f"--add-runtime runsc={runsc} --default-runtime runsc")
    yield host
    private_engine.stop_another(folder)


@pytest.fixture(scope="module")
def bench(host: str, session_folder: Path) -> Bench:
    settings = Settings(session_folder / "gvisor" / "data", session_folder / "gvisor" / "run")
    return Bench(DockerEngine(settings, endpoint.parse(host)), settings, DEBIAN)


# What goes through the stream, and limits. A process inside carries the stream, and whoever kills all processes inside
# cuts it: it has to be opened again then.
GROUPS = BRIDGED | groups("controls")


@pytest.mark.parametrize("check", [pytest.param(c, id=c.name) for c in CHECKS if group_of(c) in GROUPS])
async def test_promise(bench: Bench, check: Check, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)  # for the processes that a check starts
    result = await run_one(bench, check)
    if result.outcome is Outcome.SKIPPED:
        not_applicable(result.reason)
    for handle in await bench.engine.list():
        await bench.engine.delete(handle)
    await bench.engine.aclose()
    assert result.outcome is Outcome.KEPT, f"{check.promise}\n{result.reason}"


async def test_a_sandbox_under_another_kernel(host: str, tmp_path: Path) -> None:
    engine = DockerEngine(Settings(tmp_path / "data", tmp_path / "run"), endpoint.parse(host))
    spec = SandboxSpec.of(image=DEBIAN, isolation="gvisor", limits={"memory_bytes": "256m"})
    async with AsyncSandbox(spec, engine=engine) as sandbox:
        assert "gVisor" in (await sandbox.exec("dmesg", timeout=30)).stdout
        assert await sandbox.run_command("cd /tmp; pwd", 30) == "/tmp"
        await sandbox.write_file("file", "content")
        assert (await sandbox.exec("cat file", timeout=30)).stdout == "content"
        assert (await sandbox.inspect()).state is State.RUNNING
    await engine.aclose()
    assert await engine.list() == []
