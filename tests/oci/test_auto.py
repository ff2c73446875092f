"""`auto` with an isolation that the strongest engine has not: the engine that has it is chosen."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import AsyncSandbox, SandboxManager
from atoll.engines import registry
from atoll.engines.linux.runtimes.oci_runtimes import locate
from atoll.errors import EngineUnavailableError, UnsupportedError
from atoll.settings import Settings
from needs import missing, not_applicable


@pytest.fixture
def gvisor(tmp_path: Path) -> Iterator[Settings]:
    run = Path(tempfile.mkdtemp(prefix="ag-", dir="/tmp"))  # the path of a socket is short
    settings = Settings(tmp_path / "data", run)
    tmp_path.chmod(0o755)
    run.chmod(0o755)
    if os.geteuid() != 0 or locate("runsc", settings.data_dir) is None:
        missing("needs root and runsc")
    if registry.auto(settings)[0].name != "native":
        not_applicable("`auto` is another engine here")
    yield settings
    shutil.rmtree(run)


async def test_a_sandbox_under_gvisor(gvisor: Settings) -> None:
    async with AsyncSandbox(isolation="gvisor", settings=gvisor) as sandbox:
        assert sandbox.engine_name == "oci"
        assert "gVisor" in (await sandbox.exec("dmesg")).stdout
        found = await AsyncSandbox.attach(sandbox.id, settings=gvisor)
        assert (found.engine_name, found.spec.isolation) == ("oci", "gvisor")
        await found.detach()
        async with AsyncSandbox(settings=gvisor) as other:
            assert other.engine_name == "native"
            found = await AsyncSandbox.attach(other.id, settings=gvisor)
            assert found.engine_name == "native"
            await found.detach()


async def test_a_manager(gvisor: Settings) -> None:
    async with SandboxManager(settings=gvisor) as manager:
        under_gvisor, plain = await manager.create_sandbox({"isolation": "gvisor"}), await manager.create_sandbox()
        assert (await manager.describe(under_gvisor)).engine == "oci"
        assert (await manager.describe(plain)).engine == "native"
        assert "gVisor" in (await (await manager.get_sandbox(under_gvisor)).exec("dmesg")).stdout


async def test_an_engine_that_was_named_is_never_replaced(gvisor: Settings) -> None:
    with pytest.raises(UnsupportedError, match="no isolation 'gvisor'"):
        await AsyncSandbox(isolation="gvisor", engine="native", settings=gvisor).create()


async def test_isolation_that_is_nowhere_is_refused(gvisor: Settings) -> None:
    with pytest.raises(EngineUnavailableError, match="isolation 'vm' needs kata-runtime"):
        await AsyncSandbox(isolation="vm", settings=gvisor).create()
