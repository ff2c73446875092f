"""The `native` engine from nothing to the first result, against the kernel's own unit and the programs of its kind.

`python -m benchmarks.native [ROUNDS]`: everything takes turns in one run. U is to spawn, exec and wait for a static
`true`. The peers run the same `true` in a root file system of the host's /usr with no network: `crun run` and
`runc run` with the bundle they propose themselves (no seccomp, no user namespace, no overlay: less than we do),
`bwrap` with all namespaces.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from atoll.engines.linux.native import NativeEngine
from atoll.guest import Guest, StartRequest
from atoll.model import SandboxSpec
from atoll.settings import Settings
from benchmarks.create import BWRAP
from benchmarks.measure import Samples, Timed, take_turns
from benchmarks.programs import spawn_and_wait, static_true

ROUNDS = 100
AT_MOST_U = 5.0
AT_MOST_CRUN = 0.25
_HIDE_UNIFIED = 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'


def bundle(directory: Path, runtime: str) -> Path:
    """What the runtime itself proposes, with /usr of the host and `true`."""
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
    if runtime == "crun":  # it refuses to run beside a second hierarchy that is empty
        command = ["unshare", "-m", "sh", "-c", _HIDE_UNIFIED, "sh", *command]

    async def run() -> None:
        subprocess.run([*command, f"b{os.urandom(4).hex()}"], check=True, stdin=subprocess.DEVNULL)

    return run


async def first_result(engine: NativeEngine) -> tuple[float, float]:
    """Seconds until the sandbox is there, and until the first command's result."""
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


async def compare(directory: Path, rounds: int) -> dict[str, Samples]:
    true = static_true(directory)
    engine = NativeEngine(Settings(directory / "data", directory / "run"))
    created: list[float] = []

    async def unit() -> None:
        spawn_and_wait(true)

    async def ours() -> float:
        creation, result = await first_result(engine)
        created.append(creation)
        return result

    async def bwrap() -> None:
        subprocess.run(BWRAP, check=True)

    candidates: dict[str, Callable[[], Awaitable[float | None]]] = {"U": unit, "native: first result": ours}
    if shutil.which("bwrap"):
        candidates["bwrap"] = bwrap
    for runtime in ("crun", "runc"):
        if (timed := peer(directory, runtime)) is not None:
            candidates[f"{runtime} run"] = timed
    kept = await engine.create("kept", SandboxSpec())  # the pool stays mounted, as it does on a machine in use
    try:
        found = await take_turns(candidates, rounds)
    finally:
        await engine.delete(kept)
        await engine.aclose()
    found["native: create"] = Samples(tuple(created[-rounds:]))
    return found


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    # In memory: a disk that others write to would be measured too, and for us alone.
    with tempfile.TemporaryDirectory(prefix="ab-", dir="/dev/shm") as name:
        directory = Path(name)
        directory.chmod(0o755)
        found = asyncio.run(compare(directory, rounds))
    unit = found["U"].p50
    for what, samples in found.items():
        fastest = min(samples.seconds)
        print(
            f"{what:24} p50 {samples.p50 * 1e3:8.3f} ms = {samples.p50 / unit:6.2f} U"
            f"   p99 {samples.p99 * 1e3:8.3f}   fastest {fastest * 1e3:8.3f}"
        )
    ours = found["native: first result"].p50
    verdicts = [(f"first result at most {AT_MOST_U:g} U", ours / unit <= AT_MOST_U)]
    if "crun run" in found:
        verdicts.append((f"at most {AT_MOST_CRUN:g} of crun run", ours / found["crun run"].p50 <= AT_MOST_CRUN))
    for promise, kept in verdicts:
        print(f"{'kept' if kept else 'MISSED':8}{promise}")
    raise SystemExit(0 if all(kept for _, kept in verdicts) else 1)


if __name__ == "__main__":
    main()
