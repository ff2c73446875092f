"""How long a user waits before anything happens: imports, and a whole command in a new sandbox.

Every candidate is a new process, and all take turns in one run. The peers are a Python that does nothing, the libraries
that the SDK is built upon, `bwrap` over this machine's own /usr, and `docker run`, if Docker is installed and can be
started or DOCKER_HOST names an engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import docker
from benchmarks.create import BWRAP
from benchmarks.measure import Figure, Samples, Timed, take_turns

ROUNDS = 25
PYTHON, LIBRARIES, DOCKER = "python3 -c pass", "asyncio and Pydantic", "docker run --rm true"
IMPORT, FROM, RUN, PROGRAM = "import atoll", "from atoll import Sandbox", "atoll run -- true", "with Sandbox()"
_LIBRARIES = "import asyncio, pydantic; pydantic.create_model('Model', field=(int, 0))"
_PROGRAM = "from atoll import Sandbox\nwith Sandbox() as sandbox: assert sandbox.exec('true').success"


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    if engine == "docker":  # sandboxes of the strongest engine of this machine are compared with it
        return
    own = {"ATOLL_DATA_DIR": str(directory / "data"), "ATOLL_RUN_DIR": str(directory / "run")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")} | own
    python = sys.executable
    commands: dict[str, Sequence[str]] = {
        PYTHON: [python, "-c", "pass"],
        LIBRARIES: [python, "-c", _LIBRARIES],
        IMPORT: [python, "-c", IMPORT],
        FROM: [python, "-c", FROM],
        PROGRAM: [python, "-c", _PROGRAM],
        RUN: [str(Path(python).with_name("atoll")), "run", "--", "true"],
        "bwrap": BWRAP,
    }
    with ExitStack() as started:
        if os.environ.get("DOCKER_HOST") or (shutil.which("dockerd") and os.geteuid() == 0):
            started.enter_context(docker.running_engine(directory))
            environment["DOCKER_HOST"] = os.environ["DOCKER_HOST"]
            limits = "--network none --memory 512m --cpus 1 --pids-limit 1024"  # a sandbox has no less
            commands[DOCKER] = ["docker", "run", "--rm", *limits.split(), docker.IMAGE, "true"]
        found = await take_turns({name: _timed(words, environment) for name, words in commands.items()}, ROUNDS)
    for figure in _figures(found):
        yield figure


def _timed(command: Sequence[str], environment: Mapping[str, str]) -> Timed:
    async def once() -> None:
        subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    return once


def _figures(found: Mapping[str, Samples]) -> list[Figure]:
    def compared(ours: str, peer: str, at_most: float) -> Figure:
        at, beside = found[ours], found[peer]
        detail = {"p99": at.p99 * 1e3}
        return Figure(f"startup: {ours}, p50", at.p50 * 1e3, beside.p50 * 1e3, "ms", peer, at_most, detail=detail)

    figures = [
        compared(IMPORT, PYTHON, 1.5),
        compared(FROM, PYTHON, 25.0),
        compared(FROM, LIBRARIES, 2.0),
        compared(RUN, PYTHON, 45.0),
        compared(RUN, "bwrap", 100.0),
    ]
    if DOCKER in found:
        figures += [compared(RUN, DOCKER, 1.0), compared(PROGRAM, DOCKER, 1.25)]
    return figures
