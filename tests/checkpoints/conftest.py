"""Engines with an installation of their own, which must end up empty but for the snapshots that a test made."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.engines.base import Checkpointing
from atoll.engines.linux.native import NativeEngine
from atoll.engines.linux.oci import OciEngine
from atoll.engines.linux.oci.runtimes import locate
from atoll.sandbox import AsyncSandbox
from atoll.settings import Settings
from needs import missing, need

ENGINES = ("native", "runc", "runsc")
MakeSandbox = Callable[..., AsyncSandbox]


@pytest.fixture
def settings() -> Iterator[Settings]:
    folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
    folder.chmod(0o755)
    yield Settings(folder / "data", folder / "run")
    mounted = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]
    shutil.rmtree(folder, ignore_errors=True)
    assert mounted == []


def engine_named(name: str, settings: Settings) -> OciEngine:
    need("root", "mkfs.btrfs")
    if name != "native" and locate(name, Path("/nonexistent")) is None:
        missing(f"needs {name}: run 'make setup-test'")
    return NativeEngine(settings) if name == "native" else OciEngine(settings, name)


async def emptied(engine: OciEngine) -> None:
    for handle in await engine.list():
        await engine.delete(handle)
    for snapshot in await engine.snapshots():
        await engine.delete_snapshot(snapshot.name)
    await engine.gc()
    assert engine._places.layers.list() == []
    assert engine._places.layers.list_saved() == []
    await engine.aclose()


@pytest.fixture(params=ENGINES)
async def engine(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[OciEngine]:
    engine = engine_named(request.param, settings)
    assert isinstance(engine, Checkpointing)
    yield engine
    await emptied(engine)


@pytest.fixture
async def native(settings: Settings) -> AsyncIterator[OciEngine]:
    engine = engine_named("native", settings)
    yield engine
    await emptied(engine)


@pytest.fixture
def sandbox_on(settings: Settings) -> MakeSandbox:
    def make(engine: OciEngine, **spec: Any) -> AsyncSandbox:
        if engine._runtime == "runsc":
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
