"""Undo of a sandbox on a server, through the client and over REST."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from atoll import AsyncSandbox, CheckpointNotFoundError, UnsupportedError
from atoll.settings import Settings
from server.running import RunningServer, running_server


@pytest.fixture(scope="module")
def native_server(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> Iterator[RunningServer]:
    need_engine("native", session_settings)
    with running_server(session_folder / "undo", "native") as running:
        yield running


async def test_going_back_on_a_server(native_server: RunningServer, session_settings: Settings) -> None:
    async with AsyncSandbox(
        server=native_server.url, api_key=native_server.key, settings=session_settings, undo=True
    ) as sandbox:
        await sandbox.write_file("file", "one")
        checkpoint = await sandbox.checkpoint("base")
        await sandbox.write_file("file", "two")
        assert [str(change) for change in await sandbox.diff(checkpoint)] == ["C /workspace/file"]
        (change,) = await sandbox.diff("base", text=True)
        assert change.text is not None
        assert "-one" in change.text
        await sandbox.rollback("base")
        assert await sandbox.read_file("file") == "one"
        with pytest.raises(CheckpointNotFoundError):
            await sandbox.rollback("never")
        with pytest.raises(UnsupportedError):
            await sandbox.fork()
        await sandbox.exec("rm file")
        await sandbox.undo()
        assert await sandbox.read_file("file") == "one"
        await sandbox.restart()
        assert not await sandbox.exists("file")
        await sandbox.delete_checkpoint(checkpoint)
        assert [each.id for each in await sandbox.checkpoints() if each.name == "base"] == []


def test_what_is_of_the_servers_machine_is_for_administrators(native_server: RunningServer) -> None:
    headers = {"Authorization": f"Bearer {native_server.key}"}
    with httpx.Client(base_url=f"{native_server.url}/api/v1", headers=headers) as admin:
        assert admin.post("/users", json={"id": "eve", "quotas": {}}).status_code == 201
        wanted = {"user_id": "eve", "name": "test", "scopes": ["read", "use", "manage"]}
        key = admin.post("/keys", json=wanted).json()["key"]
    with httpx.Client(base_url=f"{native_server.url}/api/v1", headers={"Authorization": f"Bearer {key}"}) as eve:
        for image in ("tar:/etc/passwd", "docker:x", "snapshot:x"):
            assert eve.post("/sandboxes", json={"settings": {"image": image}}).status_code == 403
