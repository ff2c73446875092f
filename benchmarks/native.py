"""The `native` engine, from nothing to the first result, compared with the kernel's own unit and similar programs.

All candidates take turns in one run. The unit U is to spawn, exec and wait for a static `true`. The peers run the same
`true` in a root file system of the host's /usr without a network: `crun run` and `runc run` with the bundle that they
generate themselves (no seccomp, no user namespace, no overlay: less than Atoll does), `bwrap` with all namespaces, and
Atoll's `oci` engine, which does the same as `native` by means of runc. `docker run` is measured if a Docker engine
answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from atoll.engines.contract import Engine
from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.guest import Guest, StartRequest
from atoll.model import Handle, SandboxSpec
from atoll.settings import Settings
from benchmarks import rates
from benchmarks.create import BWRAP
from benchmarks.measure import Figure, Samples, Timed, take_turns
from benchmarks.programs import spawn_and_wait, static_true

ROUNDS = 60
IDLE = 200
FEW, MANY = 10, 1000
MIB = 1 << 20
_HIDE_UNIFIED = 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'


def bundle(directory: Path, runtime: str) -> Path:
    """Create the bundle that the OCI runtime itself generates, with /usr of the host and `true`."""
    directory.mkdir()
    subprocess.run([runtime, "spec"], cwd=directory, check=True)
    config = json.loads((directory / "config.json").read_text())
    config["process"] |= {"terminal": False, "args": ["/usr/bin/true"]}
    config["mounts"].append({"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]})
    root = directory / "rootfs"
    for name in ("usr", "proc", "sys", "dev"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def peer(directory: Path, runtime: str) -> Timed | None:
    if shutil.which(runtime) is None:
        return None
    made = bundle(directory / runtime, runtime)
    command = [runtime, "--root", str(directory / f"{runtime}-state"), "run", "--bundle", str(made)]
    if runtime == "crun":  # crun refuses to run beside a second, empty hierarchy
        command = ["unshare", "-m", "sh", "-c", _HIDE_UNIFIED, "sh", *command]

    async def run() -> None:
        subprocess.run([*command, f"b{os.urandom(4).hex()}"], check=True, stdin=subprocess.DEVNULL)

    return run


async def first_result(engine: Engine) -> tuple[float, float]:
    """Return the seconds until the sandbox exists, and until the first command's result."""
    clock = asyncio.get_running_loop().time
    started = clock()
    handle = await engine.create(f"b{os.urandom(6).hex()}", SandboxSpec())
    created = clock()
    guest = Guest(lambda: engine.connect(handle))
    try:
        done = await guest.processes.run(StartRequest(id=b"1", argv=("true",)), limit_bytes=1024)
        assert done.exit.exit_code == 0
        return created - started, clock() - started
    finally:
        await guest.aclose()
        await engine.delete(handle)


def docker() -> Timed | None:
    """Measure `docker run` with an image of the host's /usr alone, if a Docker engine answers."""
    command = ["docker", "run", "--rm", "--network", "none", "-v", "/usr:/usr:ro", "atoll-bench", "/usr/bin/true"]
    if shutil.which("docker") is None or subprocess.run(["docker", "version"], capture_output=True).returncode != 0:
        return None
    subprocess.run(f"tar -c -C / bin lib lib64 | docker import - {command[-2]}", shell=True, check=True)

    async def run() -> None:
        subprocess.run(command, check=True)

    return run


async def compare(engine: NativeEngine, directory: Path, rounds: int) -> dict[str, Samples]:
    true = static_true(directory)
    created: list[float] = []
    oci = OciEngine(Settings(directory / "data", directory / "run"), "runc")

    async def unit() -> None:
        spawn_and_wait(true)

    async def ours() -> float:
        creation, result = await first_result(engine)
        created.append(creation)
        return result

    async def by_runc() -> float:
        return (await first_result(oci))[1]

    async def bwrap() -> None:
        subprocess.run(BWRAP, check=True)

    candidates: dict[str, Callable[[], Awaitable[float | None]]] = {"U": unit, "native": ours}
    if shutil.which("bwrap"):
        candidates["bwrap"] = bwrap
    for runtime in ("crun", "runc"):
        if (timed := peer(directory, runtime)) is not None:
            candidates[f"{runtime} run"] = timed
    if shutil.which("runc"):
        candidates["engine oci"] = by_runc
    if (timed := docker()) is not None:
        candidates["docker run"] = timed
    kept = await engine.create("kept", SandboxSpec())  # the storage pool stays mounted, as on a machine in use
    try:
        found = await take_turns(candidates, rounds)
    finally:
        await engine.delete(kept)
        await oci.aclose()
    found["native: create alone"] = Samples(tuple(created[-rounds:]))
    return found


async def crowd(engine: NativeEngine, handles: list[Handle], count: int) -> None:
    while len(handles) < count:
        handles.append(await engine.create(f"crowd-{len(handles)}", SandboxSpec()))


async def latency(engine: NativeEngine, rounds: int) -> Samples:
    return (await take_turns({"native": lambda: _second(engine)}, rounds))["native"]


async def _second(engine: NativeEngine) -> float:
    return (await first_result(engine))[1]


async def _once(engine: NativeEngine) -> None:
    await first_result(engine)


async def among_many(engine: NativeEngine, rounds: int) -> AsyncIterator[Figure]:
    handles: list[Handle] = []
    try:
        await crowd(engine, handles, FEW)
        few = await latency(engine, rounds)
        await crowd(engine, handles, IDLE)
        used = [(await engine.stats(handle)).memory_bytes or 0 for handle in handles]
        yield Figure(
            f"native: {IDLE} idle sandboxes, memory of each", sum(used) / IDLE / MIB, 1.0, "MiB", "one MiB", at_most=1.0
        )
        await crowd(engine, handles, MANY)
        many = await latency(engine, rounds)
        yield Figure(
            f"native: first result among {MANY}", many.p50 * 1e3, few.p50 * 1e3, "ms", f"among {FEW}", at_most=1.3
        )
    finally:
        for handle in handles:
            await engine.delete(handle)


def figures(found: dict[str, Samples]) -> Sequence[Figure]:
    promises = {"U": 10.0, "crun run": 0.25, "engine oci": 0.25, "docker run": 1 / 25, "bwrap": None, "runc run": None}
    ours = found["native"]
    rows = [("native: first result", ours, name, most) for name, most in promises.items() if name in found]
    rows.append(("native: create alone", found["native: create alone"], "U", 6.0))
    return [
        Figure(
            what, samples.p50 * 1e3, found[name].p50 * 1e3, "ms", name, at_most=most, detail={"p99": samples.p99 * 1e3}
        )
        for what, samples, name, most in rows
    ]


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    del directory, engine
    # In memory, because writes of other programs to a disk would be measured too, and for Atoll only.
    with tempfile.TemporaryDirectory(prefix="ab-", dir="/dev/shm") as name:
        path = Path(name)
        path.chmod(0o755)
        native = NativeEngine(Settings(path / "data", path / "run"))
        try:
            for figure in figures(await compare(native, path, ROUNDS)):
                yield figure
            if rates.has_docker():
                yield await rates.against_docker("native", lambda: _once(native), at_least=10.0)
            async for figure in among_many(native, ROUNDS):
                yield figure
        finally:
            await native.aclose()
