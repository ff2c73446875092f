"""A server in front of another one: its engine is `remote`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from atoll import AsyncSandbox
from atoll.errors import EngineUnavailableError
from server.running import RunningServer, running_server, start_server


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_sandbox_two_servers_away_is_as_any_other(server: RunningServer, session_folder: Path) -> None:
    assert server.key is not None
    behind = {"ATOLL_URL": server.url, "ATOLL_API_KEY": server.key}
    folder = session_folder / f"front-{server.folder.name}"
    front = start_server(folder, "remote", 0, **behind)
    with front.client() as client:
        id = client.post("/sandboxes", json={"labels": {"a": "b"}}).json()["id"]
        assert client.get(f"/sandboxes/{id}").json()["engine"] == "remote"
        assert client.post(f"/sandboxes/{id}/exec", json={"command": "echo hi"}).json()["stdout"] == "hi\n"
        client.put(f"/sandboxes/{id}/files/content", params={"path": "f"}, content=b"kept")
    with server.client() as client:
        assert id in [info["name"] for info in client.get("/sandboxes/search").json()["items"]]
    # The one in front is killed; the next one finds the sandbox on the other server again.
    front.stop(signal.SIGKILL)
    front.close()
    with running_server(folder, "remote", **behind) as again:
        sandbox = await AsyncSandbox.attach(id, server=again.url, api_key=again.key)
        assert await sandbox.read_file("f") == "kept"
        await sandbox.cleanup()
    with server.client() as client:
        assert client.get("/sandboxes/search", params={"name": id}).json()["items"] == []


async def test_a_server_that_goes_away_is_an_error_of_ours() -> None:

    with pytest.raises(EngineUnavailableError, match="cannot be reached"):
        await AsyncSandbox(server="http://127.0.0.1:1", api_key="x").create()
