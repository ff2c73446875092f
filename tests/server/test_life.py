"""The life of a server: first run, restart, end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.settings import Settings
from leftovers import leftovers
from needs import need
from server.running import RunningServer, start_server


@pytest.mark.usefixtures("server")
def test_sandboxes_and_keys_outlive_the_server(session_folder: Path) -> None:
    folder = session_folder / "life"
    first = start_server(folder)
    with first.client() as client:
        id = client.post("/sandboxes", headers={"Idempotency-Key": "k"}).json()["id"]
        session = client.get(f"/sandboxes/{id}").json()["session_api_key"]
        client.put(f"/sandboxes/{id}/files/content", params={"path": "f"}, content=b"kept")
        command = client.post(f"/sandboxes/{id}/commands", json={"command": "echo before; sleep 600"}).json()["id"]
    assert first.stop() == 0
    second = start_server(folder)
    try:
        with second.client() as client:
            assert client.get(f"/sandboxes/{id}").json()["session_api_key"] == session
            assert client.get(f"/sandboxes/{id}/files/content", params={"path": "f"}).content == b"kept"
            assert command in [each["id"] for each in client.get(f"/sandboxes/{id}/commands").json()["items"]]
            assert client.post("/sandboxes", headers={"Idempotency-Key": "k"}).json()["id"] == id
            assert client.delete(f"/sandboxes/{id}").status_code == 200
    finally:
        assert second.stop() == 0
        for server in (first, second):
            server.close()


@pytest.mark.usefixtures("server")
def test_a_term_signal_lets_what_is_under_way_end(session_folder: Path) -> None:
    running = start_server(session_folder / "drain")
    with running.client() as client:
        id = client.post("/sandboxes").json()["id"]
        with client.stream(
            "POST", f"/sandboxes/{id}/exec/stream", json={"command": "echo go; sleep 1; echo done"}
        ) as stream:
            text = ""
            for line in stream.iter_lines():
                text += line
                if '"go\\n"' in line:
                    running.process.send_signal(signal.SIGTERM)
        assert '"done\\n"' in text
    assert running.process.wait(30) == 0
    again = start_server(session_folder / "drain")
    with again.client() as client:
        assert client.delete(f"/sandboxes/{id}").status_code == 200
    assert again.stop() == 0
    for server in (running, again):
        server.close()


def test_a_bad_configuration_is_a_message(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text("[server]\nport = 'x'\n")
    command = [sys.executable, "-m", "atoll.cli", "serve", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ})
    assert done.returncode == 125
    assert "Invalid server configuration: port" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_keeps_a_server_from_starting_is_a_message(server: RunningServer, tmp_path: Path) -> None:
    """Another one works on the same state; the database is not there."""
    state = {"ATOLL_STATE_DIR": str(server.folder / "state"), "ATOLL_DATA_DIR": str(server.folder / "data")}
    elsewhere = {"ATOLL_STATE_DIR": str(tmp_path / "s"), "ATOLL_DATA_DIR": str(tmp_path / "d")}
    nowhere = {**elsewhere, "ATOLL_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}
    for variables, said in ((state, "another manager"), (nowhere, "the database cannot be used")):
        environment = {**os.environ, "ATOLL_RUN_DIR": str(tmp_path / "r"), **variables}
        command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", "serve", "--engine", "bubblewrap", "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 125
        assert said in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("server")
def test_a_deletion_wins_over_a_restart(session_folder: Path) -> None:
    """Whoever asked for the restart is told, and nothing of the sandbox is left."""
    need("root")
    folder = session_folder / "wins"
    running = start_server(folder, "native")
    try:
        with running.client() as one, running.client() as other, ThreadPoolExecutor() as threads:
            for number in range(4):
                id = one.post("/sandboxes").json()["id"]
                restarting = threads.submit(one.post, f"/sandboxes/{id}/restart")
                time.sleep(0.02 * number)
                assert other.delete(f"/sandboxes/{id}").status_code == 200
                assert restarting.result().status_code in (204, 404, 410), restarting.result().text
                assert other.get(f"/sandboxes/{id}").status_code in (404, 410)
    finally:
        assert running.stop() == 0
        running.close()
    assert leftovers(Settings(folder / "data", folder / "run")) == []
