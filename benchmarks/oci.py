"""The `oci` engine compared with its OCI runtimes alone on the same root file system, and with Docker if an engine
answers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.cgroups.hierarchy import Hierarchy
from atoll.engines.linux.host_image import host_view
from atoll.engines.linux.oci_engine import OciEngine
from atoll.engines.linux.runtimes.oci_runtimes import isolation_of, locate
from atoll.model import SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from benchmarks.measure import Figure, Timed, take_turns

ROUNDS, GVISOR_ROUNDS = 60, 15
IDLE, DOCKER_IDLE = 200, 20
SETTLE_S = 0.1
"""A pause before each turn: the kernel dismantles the previous namespaces and control groups asynchronously."""
MIB = 1 << 20
DOCKER_IMAGE = "atoll-benchmark"
PROGRAM = """
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) { if (argc > 1 && !strcmp(argv[1], "wait")) pause(); return 0; }
"""


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    if engine != "oci":
        return
    settings = Settings(directory / "data", directory / "run")
    ours = OciEngine(settings)
    docker = Docker(directory)
    try:
        docker_works = await asyncio.to_thread(docker.prepare)
        async for figure in starting(directory, settings, "runc", ROUNDS, docker if docker_works else None):
            yield figure
        if locate("runsc", settings.data_dir) is not None:
            async for figure in starting(directory, settings, "runsc", GVISOR_ROUNDS, None):
                yield figure
        async for figure in idling(settings, docker if docker_works else None):
            yield figure
    finally:
        await asyncio.to_thread(docker.clear)
        for handle in await ours.list():
            await ours.delete(handle)
        await ours.gc()
        await ours.aclose()


# --- from nothing to the first result --------------------------------------------------------------------------------


async def starting(
    directory: Path, settings: Settings, runtime: str, rounds: int, docker: Docker | None
) -> AsyncIterator[Figure]:
    program = locate(runtime, settings.data_dir)
    assert program is not None
    engine = OciEngine(settings, runtime)
    command = bare_command(directory, program, settings)

    async def bare() -> float:
        return await run(*command, "run", "--bundle", str(directory / "bundle"), f"bare-{os.urandom(4).hex()}")

    async def ours() -> float:
        await asyncio.sleep(SETTLE_S)
        started = time.perf_counter()
        async with AsyncSandbox(SandboxSpec(), engine=engine, settings=settings) as sandbox:
            assert (await sandbox.exec(["true"])).success
            return time.perf_counter() - started

    async def by_docker() -> float:
        return await run("docker", "run", "--rm", "--network", "none", DOCKER_IMAGE, "/program")

    candidates: dict[str, Timed] = {"bare": bare, "ours": ours}
    if docker is not None:
        candidates["docker"] = by_docker
    found = await take_turns(candidates, rounds)
    await engine.aclose()
    detail = {f"{name} p99 ms": samples.p99 * 1e3 for name, samples in found.items()}
    name = f"oci on {runtime}: create to first result, p50"
    mine, peer = found["ours"].p50 * 1e3, found["bare"].p50 * 1e3
    yield Figure(name, mine, peer, "ms", f"bare {runtime} run", at_most=1.3, detail=detail)
    if docker is not None:
        yield Figure(name, mine, found["docker"].p50 * 1e3, "ms", "docker run --network none", at_most=0.25)


def bare_command(directory: Path, program: Path, settings: Settings) -> list[str]:
    """Create a bundle with the root file system of the image `host`, as `runc spec` would write it."""
    bundle = directory / "bundle"
    if not bundle.exists():
        bundle.mkdir()
        skeleton = host_view.skeleton(settings.engine_data_dir("oci") / "host") / host_view.INNER
        shutil.copytree(skeleton, bundle / "rootfs", symlinks=True)
        subprocess.run(["runc", "spec"], cwd=bundle, check=True)
        config = json.loads((bundle / "config.json").read_text())
        config["process"] |= {"terminal": False, "args": ["true"]}
        config["root"]["readonly"] = False
        usr = {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["bind", "ro", "nosuid", "nodev"]}
        config["mounts"].append(usr)
        (bundle / "config.json").write_text(json.dumps(config))
    options = (
        ["--platform=systrap", "--network=none", "--overlay2=none"]
        if isolation_of(program.name) != "namespaces"
        else []
    )
    return [str(program), "--root", str(directory / f"bare-{program.name}"), *options]


async def run(*argv: str) -> float:
    await asyncio.sleep(SETTLE_S)
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{argv[0]} failed: {said.decode(errors='replace')[-500:]}")
    return time.perf_counter() - started


# --- the memory of those that wait -----------------------------------------------------------------------------------


async def idling(settings: Settings, docker: Docker | None) -> AsyncIterator[Figure]:
    """Measure idle sandboxes: what the kernel charges to each control group, its own structures included, and the
    private memory of the processes that serve only this sandbox.

    How much less memory is available on the whole machine is reported as well: it is the same on a quiet machine, and
    meaningless on a busy one.
    """
    engine = OciEngine(settings, "runc")
    try:
        async with settled() as used:
            for _ in range(IDLE):
                sandbox = AsyncSandbox(SandboxSpec(), engine=engine, settings=settings)
                await sandbox.create()
                assert (await sandbox.exec(["true"])).success
                await sandbox.detach()
        charged = [(await engine.stats(handle)).memory_bytes or 0 for handle in await engine.list()]
        detail = {"sandboxes": float(IDLE), "MemAvailable, MiB each": used[0] / IDLE / MIB}
    finally:
        for handle in await engine.list():
            await engine.delete(handle)
        await engine.aclose()
    each = sum(charged) / IDLE / MIB
    if docker is None:
        yield Figure("oci: an idle sandbox's memory", each, 1.0, "MiB", "one MiB (no Docker here)", 1.0, detail=detail)
        return
    async with settled() as used:
        await asyncio.to_thread(docker.start_idle, DOCKER_IDLE)
    detail |= {"containers": float(DOCKER_IDLE), "their MemAvailable, MiB each": used[0] / DOCKER_IDLE / MIB}
    peer = await asyncio.to_thread(docker.idle_bytes) / DOCKER_IDLE / MIB
    yield Figure("oci: an idle sandbox's memory", each, peer, "MiB", "Docker container", 0.25, detail=detail)


@asynccontextmanager
async def settled() -> AsyncIterator[list[int]]:
    """Yield a list that receives the decrease of available memory, apart from caches."""
    used: list[int] = []
    gc.collect()
    await asyncio.sleep(1)
    before = available()
    yield used
    await asyncio.sleep(1)
    used.append(before - available())


def _private_bytes(process: Path) -> int:
    try:
        text = (process / "smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(size) * 1024 for size in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE))


def available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not say how much memory is available")


# --- Docker ----------------------------------------------------------------------------------------------------------


class Docker:
    """The Docker engine that `docker` talks to, with an image that holds one static program."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._idle: list[str] = []
        self._prepared = False

    def prepare(self) -> bool:
        if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode != 0:
            return False
        source, program, archive = (self._directory / name for name in ("program.c", "program", "image.tar"))
        source.write_text(PROGRAM)
        subprocess.run(["cc", "-static", "-Os", "-o", str(program), str(source)], check=True)
        with tarfile.open(archive, "w") as tar:
            tar.add(program, "program")
        subprocess.run(["docker", "import", str(archive), DOCKER_IMAGE], check=True, capture_output=True)
        self._prepared = True
        return True

    def start_idle(self, count: int) -> None:
        for _ in range(count):
            command = ["docker", "run", "--detach", "--network", "none", DOCKER_IMAGE, "/program", "wait"]
            self._idle.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())

    def idle_bytes(self) -> int:
        """Return the memory of the containers' control groups, and of the shim that each of them has."""
        hierarchy = Hierarchy.find()
        groups = [Group(hierarchy, f"/docker/{name}").stats().memory_bytes or 0 for name in self._idle]
        return sum(groups) + sum(_private_bytes(entry) for entry in Path("/proc").iterdir() if self._is_shim(entry))

    def _is_shim(self, entry: Path) -> bool:
        try:
            words = (entry / "cmdline").read_text().split("\0") if entry.name.isdecimal() else []
        except OSError:
            return False
        return "shim" in words[0] and any(word in self._idle for word in words) if words else False

    def clear(self) -> None:
        if self._idle:
            subprocess.run(["docker", "rm", "--force", *self._idle], capture_output=True)
        if self._prepared:
            with contextlib.suppress(OSError):
                subprocess.run(["docker", "image", "rm", "--force", DOCKER_IMAGE], capture_output=True)
