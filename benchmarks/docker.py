"""Sandboxes on a Docker engine compared with its bare API and the `docker` program, in the same run.

DOCKER_HOST names an engine with the image `atoll-test:debian`. Without it one is started for the benchmark alone, which
needs root.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll import AsyncSandbox
from atoll.compat.openmanus import DockerSandbox, SandboxSettings
from atoll.engines.docker.api import endpoint
from atoll.engines.docker.api.http import SLOW_S, Http
from benchmarks.measure import Figure, take_turns

IMAGE = os.environ.get("ATOLL_BENCH_IMAGE", "atoll-test:debian")
LIMITS = {"Memory": 512 << 20, "MemorySwap": 512 << 20, "NanoCpus": 1_000_000_000, "PidsLimit": 1024}
LARGE = 1 << 30
SCRIPT = Path(__file__).parents[1] / "scripts" / "test-docker"


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    if engine != "docker":
        return
    with running_engine(directory):
        async for figure in _measure(directory):
            yield figure


@contextmanager
def running_engine(directory: Path) -> Iterator[None]:
    if os.environ.get("DOCKER_HOST"):
        yield
        return
    folder, said = tempfile.mkdtemp(prefix="atb-", dir="/tmp"), directory / "host"
    try:
        with said.open("w") as out:  # a file and no pipe: the engine inherits it, and its end is not waited for
            subprocess.run([SCRIPT, "start", folder], check=True, stdout=out, timeout=400)
        os.environ["DOCKER_HOST"] = said.read_text().strip()
        yield
    finally:
        os.environ.pop("DOCKER_HOST", None)
        subprocess.run([SCRIPT, "stop", folder], check=True, timeout=120)


async def _measure(directory: Path) -> AsyncIterator[Figure]:
    http = Http(endpoint.find())
    yield await _create(http)
    async with DockerSandbox(SandboxSettings(image=IMAGE)) as sandbox:
        assert sandbox.container is not None
        async for figure in _commands(http, sandbox, sandbox.container.id):
            yield figure
    # The engine writes outside the container's memory limit; the sandbox's is large enough not to matter either.
    async with DockerSandbox(SandboxSettings(image=IMAGE, memory_limit="4g")) as sandbox:
        assert sandbox.container is not None
        yield await _copying(sandbox, sandbox.container.id, directory)
    yield await _cleanup(http)


async def _bare(http: Http, command: list[str], host: dict[str, Any]) -> str:
    """Create a limited container without a network through the API, with the least possible requests."""
    name = f"atoll-bench-{secrets.token_hex(4)}"
    body = {"Image": IMAGE, "Cmd": command, "HostConfig": {"NetworkMode": "none", **host}}
    await http.call("POST", "/containers/create", query={"name": name}, body=body, timeout_s=SLOW_S)
    await http.call("POST", f"/containers/{name}/start", timeout_s=SLOW_S)
    return name


async def _create(http: Http) -> Figure:
    async def bare() -> float:
        started = time.perf_counter()
        name = await _bare(http, ["sleep", "1000"], LIMITS)
        elapsed = time.perf_counter() - started
        await http.call("DELETE", f"/containers/{name}", query={"force": "1"}, timeout_s=SLOW_S)
        return elapsed

    async def ours() -> float:
        started = time.perf_counter()
        sandbox = AsyncSandbox(engine="docker", image=IMAGE, memory="512m", cpus=1.0, pids=1024)
        await sandbox.create()
        elapsed = time.perf_counter() - started
        await sandbox.cleanup()
        return elapsed

    found = await take_turns({"bare": bare, "ours": ours}, rounds=30)
    name, peer = "docker: create, agent answering, p50", "bare API: create and start"
    return Figure(name, found["ours"].p50 * 1e3, found["bare"].p50 * 1e3, "ms", peer, at_most=1.15)


async def _commands(http: Http, sandbox: DockerSandbox, container: str) -> AsyncIterator[Figure]:
    async def program() -> None:
        subprocess.run(["docker", "exec", container, "true"], check=True)

    async def ours() -> None:
        assert (await sandbox.exec(["true"])).success

    async def typed() -> None:
        assert await sandbox.run_command("echo hi") == "hi"

    found = await take_turns({"docker exec": program, "exec": ours, "run_command": typed}, rounds=50)
    at, peer = found["exec"].p50 * 1e3, found["docker exec"].p50 * 1e3
    yield Figure("docker: exec true, p50", at, peer, "ms", "docker exec true", at_most=1 / 20)
    yield Figure("docker: run_command, p50", found["run_command"].p50 * 1e3, at, "ms", "our exec true", at_most=3.0)


async def _copying(sandbox: DockerSandbox, container: str, directory: Path) -> Figure:
    large = directory / "large"
    block = os.urandom(1 << 20)
    with large.open("wb") as file:
        for _ in range(LARGE >> 20):
            file.write(block)

    # Both write a file that does not exist, because some file systems flush a replaced file at once; and neither waits
    # for the disk because of what the other has written.
    async def settle() -> None:
        await sandbox.sandbox.remove("large", missing_ok=True)
        os.sync()

    async def program() -> float:
        await settle()
        started = time.perf_counter()
        subprocess.run(["docker", "cp", "-q", str(large), f"{container}:/workspace/large"], check=True)
        return time.perf_counter() - started

    async def ours() -> float:
        await settle()
        started = time.perf_counter()
        await sandbox.copy_to(large, "large")
        return time.perf_counter() - started

    found = await take_turns({"docker cp": program, "copy_to": ours}, rounds=5, warm_up=1)
    rates = {name: LARGE / samples.p50 / 1e9 for name, samples in found.items()}
    return Figure("docker: 1 GiB in", rates["copy_to"], rates["docker cp"], "GB/s", "docker cp", at_least=2.0)


async def _cleanup(http: Http) -> Figure:
    async def program() -> float:
        name = await _bare(http, ["tail", "-f", "/dev/null"], {})
        started = time.perf_counter()
        subprocess.run(["docker", "stop", "--time", "5", name], check=True, stdout=subprocess.DEVNULL)
        elapsed = time.perf_counter() - started
        await http.call("DELETE", f"/containers/{name}", query={"force": "1"}, timeout_s=SLOW_S)
        return elapsed

    async def ours() -> float:
        sandbox = await DockerSandbox(SandboxSettings(image=IMAGE)).create()
        await sandbox.run_command("trap '' TERM; sleep 1000 &")
        started = time.perf_counter()
        await sandbox.cleanup()
        return time.perf_counter() - started

    found = await take_turns({"stop": program, "ours": ours}, rounds=5, warm_up=1)
    peer = "docker stop of a first process that ignores SIGTERM"
    return Figure("docker: cleanup, p50", found["ours"].p50 * 1e3, found["stop"].p50 * 1e3, "ms", peer, at_most=1 / 5)
