"""How much a container tells about the machine, judged by the same probe as on the other engines."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import AsyncSandbox, SandboxSpec
from atoll.engines.docker.api import endpoint
from atoll.engines.docker.engine import DockerEngine
from atoll.model import Volume
from atoll.settings import Settings
from docker.private_engine import DEBIAN, SCRIPT, START_S, stop_another, where
from needs import missing, not_applicable
from security import probe

PROGRAM = Path(probe.__file__).read_text()
EXPLAINED = {"A20.host_root", "C03.host_paths", "C03.layers"}
"""Docker's own ways, as SECURITY.md says: root is the host's without `userns-remap`, the mount table names paths."""
MAPPED = "0 300000 65536"


@pytest.fixture
def known_machine() -> None:
    if platform.machine() != "x86_64":
        not_applicable("the probe knows the system calls of x86-64")


async def open_walls(engine: DockerEngine, user: str) -> dict[str, str]:
    python = Volume.parse("/usr:/usr:ro")  # the machine's own: the image's is a small one
    spec = SandboxSpec.of(image=DEBIAN, limits={"pids": 200}, volumes=(python,))
    async with AsyncSandbox(spec, engine=engine) as sandbox:
        said = await sandbox.exec(["python3", "-I", "-"], stdin=PROGRAM, user=user, timeout=60)
        assert said.success, said.stderr
    lines = [json.loads(line) for line in said.stdout.splitlines()]
    assert {line["id"] for line in lines} == probe.CHECKS.keys(), "the probe did not run to its end"
    return {line["id"]: line["why"] for line in lines if line["verdict"] != "HELD"}


@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("user", ["0", "1000"])
async def test_no_wall_is_open_but_those_that_are_explained(engine: DockerEngine, user: str) -> None:
    found = await open_walls(engine, user)
    assert found.keys() <= EXPLAINED, found


@pytest.fixture
def remapped() -> Iterator[str]:
    """The address of an engine with `userns-remap`. Its table of ids is its own: nothing of this machine is changed."""
    where()  # says whether there can be any
    folder = Path(tempfile.mkdtemp(prefix="atd-", dir="/tmp"))
    folder.chmod(0o711)
    table = folder / "ids"
    table.write_text("daemon:300000:65536\n")
    alone = 'mount --bind "$0" /etc/subuid; mount --bind "$0" /etc/subgid; exec "$@"'
    command: list[str | Path] = [
        "unshare",
        "--mount",
        "--propagation",
        "slave",
        "sh",
        "-c",
        alone,
        table,
        SCRIPT,
        "start",
        folder,
    ]
    for name in ("/etc/subuid", "/etc/subgid"):
        if not os.path.exists(name):
            missing(f"there is no {name}")
    with open(folder / "said", "w+") as said:
        variables = {**os.environ, "DOCKERD_OPTIONS": "--userns-remap=daemon"}
        done = subprocess.run(command, stdout=said, stderr=said, timeout=START_S, env=variables)
        said.seek(0)
        text = said.read().strip()
    try:
        assert done.returncode == 0, text
        yield text.splitlines()[-1]
    finally:
        stop_another(str(folder))


async def test_the_user_namespace_of_the_engine_is_used(remapped: str, settings: Settings) -> None:
    engine = DockerEngine(settings, endpoint.parse(remapped))
    async with AsyncSandbox(SandboxSpec.of(image=DEBIAN, network="all"), engine=engine) as sandbox:
        assert (await sandbox.exec(["cat", "/proc/self/uid_map"])).stdout.split() == MAPPED.split()
        await sandbox.write_file("/etc/mine", "root of itself alone")
        assert (await sandbox.exec("chown 1000 /etc/mine && su -s /bin/sh nobody -c id")).success
        assert "eth0" in (await sandbox.exec(["cat", "/proc/net/dev"])).stdout
    await engine.aclose()
    assert await engine.list() == []
