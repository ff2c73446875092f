"""The cap of a server: refuse, or pause the one that was idle longest. On an engine that can pause."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.settings import Settings
from server.running import running_server

NeedEngine = Callable[[str, Settings], None]


@pytest.fixture
def native(session_settings: Settings, need_engine: NeedEngine) -> str:
    need_engine("native", session_settings)
    return "native"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_cap_is_exact_and_refuses(native: str, session_folder: Path) -> None:
    with running_server(session_folder / "cap", native, ATOLL_MAX_NUM_SANDBOXES="3") as server:
        with server.client() as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: client.post("/sandboxes"), range(8)))
            assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 5


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_cap_pauses_the_oldest_and_use_wakes_it(native: str, session_folder: Path) -> None:
    options = {"ATOLL_MAX_NUM_SANDBOXES": "2", "ATOLL_AT_CAP": "pause"}
    with running_server(session_folder / "pausing", native, **options) as server, server.client() as client:
        ids = [client.post("/sandboxes").json()["id"] for _ in range(3)]
        first = client.get(f"/sandboxes/{ids[0]}").json()
        assert (first["status"], first["session_api_key"], first["exposed_urls"]) == ("PAUSED", None, None)
        assert client.post(f"/sandboxes/{ids[0]}/exec", json={"command": "echo awake"}).json()["stdout"] == "awake\n"
        states = [info["status"] for info in client.get("/sandboxes/search").json()["items"]]
        assert sorted(states) == ["PAUSED", "RUNNING", "RUNNING"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_pausing_resuming_and_pausing_the_old_ones(native: str, session_folder: Path) -> None:
    with running_server(session_folder / "old", native) as server, server.client() as client:
        ids = [client.post("/sandboxes").json()["id"] for _ in range(3)]
        key = client.get(f"/sandboxes/{ids[2]}").json()["session_api_key"]
        for _ in range(2):
            assert client.post(f"/sandboxes/{ids[2]}/pause").json() == {"success": True}
        with server.client("", **{"X-Session-API-Key": key}) as session:
            assert session.get(f"/sandboxes/{ids[2]}").status_code == 401
            assert client.post(f"/sandboxes/{ids[2]}/resume").json() == {"success": True}
            assert session.get(f"/sandboxes/{ids[2]}").json()["status"] == "RUNNING"
        assert client.post("/sandboxes/pause-old", json={"max_num_sandboxes": 1}).json() == ids[:2]
        assert client.post("/sandboxes/pause-old", json={"max_num_sandboxes": 0}).status_code == 422
