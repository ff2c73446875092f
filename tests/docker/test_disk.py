"""Disk limits of containers: enforced where the engine's storage can, refused with the reason where it cannot."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.engines.docker import container_plan
from atoll.engines.docker.api import disk_limit, endpoint, facts
from atoll.engines.docker.api.image_pull import Image
from atoll.engines.docker.connect.agent_volume import Agent
from atoll.engines.docker.engine import DockerEngine
from atoll.errors import UnsupportedError
from atoll.model import Capability, SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from docker import private_engine
from docker.test_plan import INFO, WHO
from needs import missing, not_applicable

MIB = 1 << 20
SNAPSHOTTER = [["driver-type", "io.containerd.snapshotter.v1"]]


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({"Driver": "btrfs"}, ""),
        ({"Driver": "zfs"}, ""),
        ({"Driver": "devicemapper"}, ""),
        ({"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]]}, "on xfs only, not on extfs"),
        (
            {"Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "xfs"]], "DockerRootDir": "/proc"},
            "not mounted with pquota",
        ),
        ({"Driver": "vfs"}, "its storage driver 'vfs' has no limits"),
        ({"Driver": "btrfs", "DriverStatus": SNAPSHOTTER}, "containerd's snapshotter 'btrfs'"),
        ({"Driver": "overlayfs", "DriverStatus": SNAPSHOTTER}, "containerd's snapshotter 'overlayfs'"),
    ],
)
def test_an_engine_says_whether_its_storage_has_limits(info: dict[str, Any], problem: str) -> None:
    known = facts.parse({**INFO, **info})
    assert problem in known.storage.problem
    assert bool(problem) == bool(known.storage.problem)
    assert (Capability.DISK in known.capabilities) is not bool(problem)


@pytest.mark.parametrize(("driver", "size"), [("btrfs", 150 * MIB), ("zfs", 50 * MIB)])
def test_the_image_does_not_take_from_the_limit(driver: str, size: int) -> None:
    image = Image("sha256:1", "amd64", {}, 100 * MIB)
    spec = SandboxSpec.of(image="x", disk="50m")
    known = facts.parse({**INFO, "Driver": driver})
    body = container_plan.container(WHO, spec, known, image, Agent("d" * 64, b""), 1.5)
    assert body["HostConfig"]["StorageOpt"] == {"size": str(size)}


def test_an_image_with_volumes_escapes_no_limit() -> None:
    with pytest.raises(UnsupportedError, match=r"declares volumes \(/data\)"):
        disk_limit.check_volumes(SandboxSpec.of(image="x", disk="50m"), ("/data",))
    disk_limit.check_volumes(SandboxSpec.of(image="x"), ("/data",))


async def test_a_limit_that_the_storage_has_not_got_is_refused_with_the_reason(
    settings: Settings, docker_host: str
) -> None:
    engine = DockerEngine(settings, private_engine.where())
    known = await facts.learn(engine._http)
    if not known.storage.problem:
        not_applicable("the Docker engine of the tests has disk limits")
    with pytest.raises(UnsupportedError) as refused:
        await AsyncSandbox(engine=engine, image=private_engine.BUSYBOX, disk="64m").create()
    assert refused.value.reason == f"engine 'docker' cannot enforce disk here: {known.storage.problem}"
    await engine.aclose()


@pytest.fixture
def on_btrfs() -> Iterator[str]:
    """The DOCKER_HOST of an engine that keeps everything on a btrfs of its own."""
    private_engine.host()  # says whether there can be any
    folder = Path(tempfile.mkdtemp(prefix="atd-", dir="/tmp"))
    (folder / "data").mkdir()
    with (folder / "disk").open("wb") as file:
        file.truncate(2 << 30)
    try:
        subprocess.run(["mkfs.btrfs", "-q", folder / "disk"], check=True)
        mount = ["mount", "-o", "loop", str(folder / "disk"), str(folder / "data")]
        mounted = subprocess.run(mount, capture_output=True, text=True)
        if mounted.returncode != 0:
            missing(f"btrfs cannot be mounted: {mounted.stderr.strip()}")
        done = private_engine._script("start", str(folder), DOCKERD_OPTIONS="--storage-driver btrfs")
        if done.returncode != 0:
            missing(f"no Docker engine on btrfs: {done.stderr.strip()[-300:]}")
        yield done.stdout.strip()
    finally:
        private_engine.stop_another(str(folder))


@pytest.mark.needs("root", "mkfs.btrfs")
@pytest.mark.timeout(180)
async def test_a_disk_limit_holds_on_btrfs(settings: Settings, on_btrfs: str) -> None:
    engine = DockerEngine(settings, endpoint.parse(on_btrfs))
    try:
        async with AsyncSandbox(engine=engine, image=private_engine.BUSYBOX, disk="8m", timeout=60) as sandbox:
            assert (await sandbox.info()).limits.disk_bytes == 8 * MIB
            fits = await sandbox.exec("dd if=/dev/urandom of=a bs=100000 count=50 && sync")
            assert fits.success, fits.stderr
            full = await sandbox.exec("dd if=/dev/urandom of=b bs=100000 count=80 && sync")
            assert "Disk quota exceeded" in full.stderr
            assert (await sandbox.exec("rm -f a b && sync && echo again > c && cat c")).stdout == "again\n"
            kept = await sandbox.checkpoint()
            await sandbox.rollback(kept)
            again = await sandbox.exec("dd if=/dev/urandom of=b bs=100000 count=120 && sync")
            assert "Disk quota exceeded" in again.stderr
    finally:
        await engine.aclose()
