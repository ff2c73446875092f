"""Engines with an installation of their own, which must end up empty but for the snapshots that a test made."""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from atoll.engines.checkpointing import Checkpointing
from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.native_engine import NativeEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.engines.linux.runtimes.oci_runtimes import locate
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.settings import Settings
from needs import missing, need

ENGINES = ("native", pytest.param("runc", marks=pytest.mark.again), "runsc")
MakeSandbox = Callable[..., AsyncSandbox]


@pytest.fixture
def settings() -> Iterator[Settings]:
    folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
    folder.chmod(0o755)
    yield Settings(folder / "data", folder / "run")
    mounted = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]
    shutil.rmtree(folder, ignore_errors=True)
    assert mounted == []


def engine_named(name: str, settings: Settings) -> LinuxEngine:
    need("root", "mkfs.btrfs")
    if name != "native" and locate(name, Path("/nonexistent")) is None:
        missing(f"needs {name}: run 'make setup-test'")
    return NativeEngine(settings) if name == "native" else OciEngine(settings, name)


async def emptied(engine: LinuxEngine) -> None:
    for handle in await engine.list():
        await engine.delete(handle)
    for snapshot in await engine.snapshots():
        await engine.delete_snapshot(snapshot.name)
    await engine.prune_steps()
    await engine.gc()
    assert engine.layout.layers.list() == []
    assert engine.layout.layers.list_saved() == []
    await engine.aclose()


@pytest.fixture(params=ENGINES)
async def engine(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[LinuxEngine]:
    engine = engine_named(request.param, settings)
    assert isinstance(engine, Checkpointing)
    yield engine
    await emptied(engine)


@pytest.fixture(params=["native", *(pytest.param(name, marks=pytest.mark.again) for name in ("runc", "runsc"))])
async def any_engine(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[LinuxEngine]:
    """For what depends little on the engine."""
    engine = engine_named(request.param, settings)
    yield engine
    await emptied(engine)


@pytest.fixture
async def native(settings: Settings) -> AsyncIterator[LinuxEngine]:
    engine = engine_named("native", settings)
    yield engine
    await emptied(engine)


@pytest.fixture
def sandbox_on(settings: Settings) -> MakeSandbox:
    def make(engine: LinuxEngine, **spec: Any) -> AsyncSandbox:
        if engine._launchers.isolation == "gvisor":
            spec.setdefault("isolation", "gvisor")
        return AsyncSandbox(engine=engine, settings=settings, **spec)

    return make


@pytest.fixture
def elsewhere() -> Iterator[Settings]:
    """Another installation. With a short path, since sockets allow no long one."""
    folder = Path(tempfile.mkdtemp(prefix="ae-", dir="/tmp"))
    folder.chmod(0o755)
    yield Settings(folder / "data", folder / "run")
    shutil.rmtree(folder)


def bare_image(archive: Path, files: Mapping[str, str]) -> str:
    """Make an image with nothing but these programs. Those of this machine are put into it by the volume /usr."""
    with tarfile.open(archive, "w") as tar:
        for name in ("etc", "etc/atoll", "etc/atoll/hooks", "tmp", "usr", "root", "workspace"):
            made = tarfile.TarInfo(name)
            made.type, made.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(made)
        for name in ("bin", "sbin", "lib", "lib64"):
            made = tarfile.TarInfo(name)
            made.type, made.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(made)
        for name, content in files.items():
            made = tarfile.TarInfo(name)
            made.mode, made.size = 0o755, len(content)
            tar.addfile(made, io.BytesIO(content.encode()))
    return f"tar:{archive}"
