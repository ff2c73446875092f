"""Running processes saved, forked and put to sleep through a server. On gVisor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll import AsyncSandbox
from atoll.engines.linux.runtimes.oci_runtimes import locate
from atoll.model import State
from atoll.settings import Settings
from checkpoints.test_memory import COUNTER, counting
from needs import missing
from server.running import RunningServer, new_folder, running_server


@pytest.fixture(scope="module")
def oci_server(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> Iterator[RunningServer]:
    need_engine("oci", session_settings)
    if locate("runsc", Path("/nonexistent")) is None:
        missing("needs runsc: run 'make setup-test'")
    with running_server(new_folder(session_folder, "memory"), "oci") as running:
        yield running


@pytest.fixture
def where(oci_server: RunningServer, session_settings: Settings) -> dict[str, Any]:
    return {"server": oci_server.url, "api_key": oci_server.key, "settings": session_settings}


@pytest.mark.timeout(240)
async def test_processes_go_on_from_a_server(where: dict[str, Any]) -> None:
    async with AsyncSandbox(**where, isolation="gvisor") as sandbox:
        await sandbox.start(["python3", "-c", COUNTER])
        await counting(sandbox, 3)
        assert (await sandbox.checkpoint("here", memory=True)).memory
        before = await counting(sandbox, 4)
        await sandbox.rollback("here")
        after = await counting(sandbox, 4)
        assert after.split()[2] == before.split()[2]
        forks = await sandbox.fork(2, memory=True)
        try:
            seen = [await counting(each, 5) for each in (sandbox, *forks)]
            assert {text.split()[0] for text in seen} == {"5"}
            assert len({text.split()[1] for text in seen}) == 3
        finally:
            for fork in forks:
                await fork.cleanup()
        await sandbox.pause(memory="disk")
        assert (await sandbox.inspect()).state is State.PAUSED
        await sandbox.resume()
        assert (await counting(sandbox, 6)).split()[2] == before.split()[2]
