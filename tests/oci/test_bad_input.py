"""What cannot be is a typed error with the reason, within its deadline, and nothing is left (see the fixture)."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from atoll.engines.linux import construction
from atoll.engines.linux.oci_engine import OciEngine
from atoll.errors import (
    EngineError,
    EngineUnavailableError,
    ImageError,
    SandboxError,
    SpecError,
    UnsupportedError,
)
from atoll.model import SandboxSpec
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from atoll.storage import PlainLayers
from oci.conftest import NeedRuntime, empty

BROKEN = {
    "hangs": "sleep 600",
    "hangs and ignores signals": "trap '' TERM INT HUP; while :; do sleep 600; done",
    "fails": "exit 3",
    "says garbage": 'for a in "$@"; do case $a in */log) head -c 200000 /dev/urandom >$a;; esac; done; exit 1',
    "lies": "exit 0",
    "writes garbage as the process": 'for a in "$@"; do case $a in */pid) echo -1 >$a;; esac; done; exit 0',
    "names somebody else": 'for a in "$@"; do case $a in */pid) echo 1 >$a;; esac; done; exit 0',
    "crashes": "kill -SEGV $$",
    "crashes after the start": 'REAL "$@"; kill -9 $$',
    "leaves a daemon": "(setsid sleep 600 &); exit 1",
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_broken_runtime(runc: OciEngine, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "runc"
    script.write_text("#!/bin/bash\n" + BROKEN[how].replace("REAL", str(shutil.which("runc"))) + "\n")
    script.chmod(0o755)
    monkeypatch.setenv("ATOLL_RUNC", str(script))
    monkeypatch.setattr(construction, "_CREATE_S", 1.5)
    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match="runc"):
            await runc.create("a", SandboxSpec())
    assert await runc.list() == []


async def test_a_runtime_that_nobody_knows(settings: Settings) -> None:
    with pytest.raises(EngineUnavailableError, match="no OCI runtime 'rnuc'"):
        OciEngine(settings, "rnuc")


async def test_a_runtime_that_is_gone(runc: OciEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_RUNC", "/nonexistent/runc")
    with pytest.raises(EngineUnavailableError, match="not installed"):
        await runc.create("a", SandboxSpec())


async def test_an_isolation_that_is_not_there_is_never_replaced(runc: OciEngine) -> None:
    with pytest.raises(EngineUnavailableError, match="kata"):
        await runc.create("a", SandboxSpec.of(isolation="vm"))
    with pytest.raises(SpecError, match="isolation"):
        SandboxSpec.of(isolation="strong")


@pytest.mark.parametrize(
    ("image", "error"),
    [("no-such-image", ImageError), ("tar:/no/such.tar", ImageError), ("", SpecError), ("a b", SpecError)],
)
async def test_an_image_that_is_not_there(runc: OciEngine, image: str, error: type[SandboxError]) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(error):
            await runc.create("a", SandboxSpec.of(image=image))
    assert await runc.list() == []


@pytest.mark.parametrize("memory", ["lots", "-1", "1x", "", "1k", True])
async def test_a_limit_that_is_none(memory: str) -> None:
    with pytest.raises(SpecError, match="memory"):
        AsyncSandbox(memory=memory)


async def test_a_limit_that_cannot_be_enforced_here(runc: OciEngine, settings: Settings) -> None:
    with pytest.raises(UnsupportedError, match="inodes"):
        await runc.create("a", SandboxSpec.of(limits={"inodes": 100}))
    runc.layout.layers = PlainLayers(settings.data_dir / "layers")
    with pytest.raises(UnsupportedError, match="disk"):
        await runc.create("a", SandboxSpec.of(limits={"disk_bytes": "100m"}))


async def test_gvisor_cannot_count_processes_and_says_so(settings: Settings, need_runtime: NeedRuntime) -> None:
    need_runtime("runsc")
    engine = OciEngine(settings)
    with pytest.raises(UnsupportedError, match="pids"):
        await engine.create("a", SandboxSpec.of(isolation="gvisor", limits={"pids": 10}))
    await empty(engine)


@pytest.mark.parametrize(
    ("host", "path", "text"),
    [
        ("/no/such/directory", "/data", "/no/such/directory"),
        ("/tmp", "/proc/x", "cannot be mounted"),
        ("/tmp", "/dev", "cannot be mounted"),
        ("/tmp", "/etc/passwd", "etc/passwd"),
    ],
)
async def test_a_volume_that_cannot_be(runc: OciEngine, host: str, path: str, text: str) -> None:
    with pytest.raises(SandboxError, match=text):
        await runc.create("a", SandboxSpec.of(volumes=[{"host": host, "path": path, "read_only": True}]))
    assert await runc.list() == []


async def test_no_permission(settings: Settings, need_runtime: NeedRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    need_runtime("runc")
    engine = OciEngine(settings, "runc")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EngineUnavailableError, match="needs root") as caught:
        await engine.create("a", SandboxSpec())
    assert caught.value.hint
    assert not OciEngine.probe(settings, thorough=False).available
    monkeypatch.undo()
    await empty(engine)


async def test_a_directory_of_somebody_else(settings: Settings, need_runtime: NeedRuntime) -> None:
    need_runtime("runc")
    settings.run_dir.mkdir(parents=True)
    os.chown(settings.run_dir, 1000, 1000)
    engine = OciEngine(settings, "runc")
    with pytest.raises(EngineUnavailableError, match="belongs to user 1000"):
        await engine.create("a", SandboxSpec())
    await empty(engine)


async def test_no_space_for_the_pool(settings: Settings, need_runtime: NeedRuntime) -> None:
    """The data directory is on a file system that is too small."""
    need_runtime("runc")
    settings.data_dir.mkdir(parents=True)
    mount = await asyncio.create_subprocess_exec(
        "mount", "-t", "tmpfs", "-o", "size=32m,mode=755", "small", str(settings.data_dir)
    )
    assert await mount.wait() == 0
    try:
        engine = OciEngine(settings, "runc")
        with pytest.raises(EngineUnavailableError, match="too little free space"):
            await engine.create("a", SandboxSpec())
        assert await engine.list() == []
        await empty(engine)
    finally:
        await (await asyncio.create_subprocess_exec("umount", str(settings.data_dir))).wait()


async def test_no_space_for_the_record(settings: Settings, need_runtime: NeedRuntime) -> None:
    need_runtime("runc")
    settings.data_dir.mkdir(parents=True)
    mount = await asyncio.create_subprocess_exec(
        "mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "small", str(settings.data_dir)
    )
    assert await mount.wait() == 0
    try:
        engine = OciEngine(settings, "runc")
        settings.installation_id()
        with pytest.raises(OSError, match="No space"):
            (settings.data_dir / "fill").write_bytes(bytes(1 << 20))
        with pytest.raises(EngineError, match="No space"):
            await engine.create("a", SandboxSpec())
        (settings.data_dir / "fill").unlink()
        assert await engine.list() == []
        await empty(engine)
    finally:
        await (await asyncio.create_subprocess_exec("umount", str(settings.data_dir))).wait()


async def test_an_image_that_cannot_be_used(runc: OciEngine, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "dev").write_text("not a directory")
    archive = tmp_path / "bad.tar"
    tar = await asyncio.create_subprocess_exec("tar", "-C", str(root), "-cf", str(archive), ".")
    assert await tar.wait() == 0
    with pytest.raises(ImageError):
        await runc.create("a", SandboxSpec.of(image=f"tar:{archive}"))
    assert await runc.list() == []
