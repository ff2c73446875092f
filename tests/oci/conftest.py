"""What the tests of the `oci` engine share: the runtimes, and installations of their own that must end up empty."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.engines.linux.oci_engine import OciEngine
from atoll.engines.linux.runtimes.oci_runtimes import locate
from atoll.settings import Settings
from needs import missing, need
from oci.remains import remains

NeedRuntime = Callable[[str], None]


@pytest.fixture(scope="session")
def need_runtime() -> NeedRuntime:
    """`need_runtime(name)` goes on if it is here and we are root: else a skip on a laptop, a failure in CI."""

    def need_one(name: str) -> None:
        need("root", "mkfs.btrfs")
        if locate(name, Path("/nonexistent")) is None:
            missing(f"needs {name}: run 'make setup-test'")

    return need_one


@pytest.fixture
def settings() -> Iterator[Settings]:
    """An installation of this test alone. When the test is over, nothing of it may be left."""
    folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
    folder.chmod(0o755)
    settings = Settings(folder / "data", folder / "run")
    yield settings
    left = remains(settings)
    shutil.rmtree(folder, ignore_errors=True)
    assert left == []


@pytest.fixture
async def runc(settings: Settings, need_runtime: NeedRuntime) -> AsyncIterator[LinuxEngine]:
    need_runtime("runc")
    engine = OciEngine(settings, "runc")
    yield engine
    await empty(engine)


async def empty(engine: LinuxEngine) -> None:
    """Delete all that there is."""
    for handle in await engine.list():
        await engine.delete(handle)
    await engine.gc()
    await engine.aclose()
