"""A server as the Manus example uses it: its names, results, tasks, setup and export, over REST, CLI and SDK."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll import AsyncSandbox, SetupError
from server import vanishing
from server.conftest import Person
from server.running import RunningServer

# The engine of these tests limits neither memory nor disk, so they ask for nothing of that.
SHAPE: dict[str, Any] = {"timeout": 3600, "network": {"allowOutbound": False}}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def bobs(server: RunningServer, bob: Person) -> Iterator[httpx.Client]:
    with server.client(bob.key) as client:
        yield client


def test_a_sandbox_is_made_and_used_under_the_names_of_the_example(client: httpx.Client) -> None:
    made = client.post("/sandboxes", json={**SHAPE, "taskId": "task.1", "setup": ["echo ready > log"]})
    assert made.status_code == 201, made.text
    assert made.json()["labels"] == {"task_id": "task.1"}
    assert made.json()["expires_at"] is not None
    good = client.post("/sandboxes/task.1/exec", json={"command": "cat log", "timeout": 300, "captureOutput": True})
    assert (
        good.json() | {"success": True, "stdout": "ready\n", "stderr": "", "exitCode": 0, "error": None} == good.json()
    )
    bad = client.post("/sandboxes/task.1/exec", json={"command": "echo why >&2; exit 7"}).json()
    assert (bad["success"], bad["exitCode"], bad["exit_code"]) == (False, 7, 7)
    assert bad["error"] == "the command failed with exit code 7: why"
    quiet = client.post("/sandboxes/task.1/exec", json={"command": "echo much", "captureOutput": False}).json()
    assert (quiet["stdout"], quiet["success"]) == ("", True)
    assert client.delete("/sandboxes/task.1").status_code == 200
    assert client.get("/sandboxes/task.1").status_code == 404


def test_names_and_tasks_lead_only_to_ones_own_sandboxes(client: httpx.Client, bobs: httpx.Client) -> None:
    anns = client.post("/sandboxes", json={"name": "box", "task_id": "job"}).json()["id"]
    for text in ("box", "job", anns):
        assert client.get(f"/sandboxes/{text}").json()["id"] == anns
        assert client.get("/sandboxes", params={"id": text}).json()[0]["id"] == anns
        assert bobs.get(f"/sandboxes/{text}").status_code == 404
        assert bobs.delete(f"/sandboxes/{text}").status_code == 404
        assert bobs.post(f"/sandboxes/{text}/exec", json={"command": "true"}).status_code == 404
    bobs_own = bobs.post("/sandboxes", json={"name": anns}).json()["id"]  # as ann's is called by the server
    try:
        assert bobs.get(f"/sandboxes/{anns}").json()["id"] == bobs_own
        assert client.get(f"/sandboxes/{anns}").json()["id"] == anns
    finally:
        assert bobs.delete(f"/sandboxes/{bobs_own}").status_code == 200
    session = client.get("/sandboxes/box").json()["session_api_key"]
    other = client.post("/sandboxes", json={"name": "other", "task_id": "job"}).json()["id"]
    assert client.get("/sandboxes/job").status_code == 409
    headers = {"X-Session-API-Key": session, "Authorization": ""}
    assert client.get("/sandboxes/box", headers=headers).json()["id"] == anns
    assert client.get("/sandboxes/other", headers=headers).status_code == 404
    assert client.get(f"/sandboxes/{other}", headers=headers).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/sandboxes", {"memroy": "1g"}, "Did you mean 'memory'?"),
        ("/sandboxes", {"settings": {"alowOutbound": True}}, "Did you mean 'allow_outbound'?"),
        ("/sandboxes", {"timeout": 5, "lifetime_s": 5}, "lifetime is given twice"),
        ("/sandboxes", {"settings": {}, "cpu": 1}, "both describe the sandbox"),
        ("/sandboxes", {"setup": "pip install x"}, "a list of command lines"),
        ("/sandboxes", {"taskId": "a/b"}, "task_id"),
        ("/sandboxes/x/exec", {"command": "true", "captureOutptu": True}, "Did you mean 'capture_output'?"),
        ("/sandboxes/x/exec", {"command": "true", "timeout": 1, "timeout_s": 1}, "timeout is given twice"),
        ("/sandboxes/x/exec", {"command": "true", "captureOutput": "maybe"}, "capture_output"),
        ("/sandbox-specs", {"id": "x", "settings": {"resources": {"cppu": 1}}}, "Did you mean 'cpu'?"),
    ],
)
def test_what_is_wrong_is_refused_with_a_hint(client: httpx.Client, path: str, body: dict[str, Any], said: str) -> None:
    refused = client.post(path, json=body)
    assert refused.status_code == 422
    assert said in refused.json()["detail"]


def test_a_failed_setup_is_told_with_its_output(client: httpx.Client) -> None:
    refused = client.post("/sandboxes", json={"setup": ["true", "echo no such package >&2; exit 3"], "name": "n"})
    assert refused.status_code == 422
    problem = refused.json()
    assert (problem["code"], problem["output"]) == ("setup_failed", "no such package\n")
    assert "setup command 2 of 2" in problem["detail"]
    assert client.get("/sandboxes/search").json()["items"] == []
    assert client.post("/sandboxes", json={"name": "n"}).status_code == 201


def test_a_client_that_vanishes_during_setup_leaves_nothing(
    client: httpx.Client, server: RunningServer, ann: Person
) -> None:
    def states() -> list[str]:
        return [info["state"] for info in client.get("/sandboxes/search").json()["items"]]

    body = json.dumps({"setup": ["sleep 600"]}).encode()
    with vanishing.ask(server.url, ann.key, "POST /sandboxes", body, "Content-Type: application/json"):
        until(lambda: states() == ["STARTING"])
    until(lambda: states() == [])


def test_a_spec_of_the_catalogue_has_setup_commands_too(client: httpx.Client) -> None:
    body = {"id": "with-setup", "settings": {"setup": ["echo here > log"], "setupTimeout": 30}}
    assert client.post("/sandbox-specs", json=body).status_code == 201
    try:
        made = client.post("/sandboxes", json={"sandboxSpecId": "with-setup"}).json()["id"]
        assert client.get(f"/sandboxes/{made}/files/content", params={"path": "log"}).text == "here\n"
    finally:
        assert client.delete("/sandbox-specs/with-setup").status_code == 204


async def test_the_sdk_leaves_setup_to_the_server(server: RunningServer, ann: Person) -> None:
    async with AsyncSandbox(server=server.url, api_key=ann.key, setup=["echo once >> log"], task_id="sdk") as sandbox:
        assert await sandbox.read_file("log") == "once\n"
        again = await AsyncSandbox.attach("sdk", server=server.url, api_key=ann.key)
        assert await again.read_file("log") == "once\n"
        await again.detach()
    with pytest.raises(SetupError) as failed:
        await AsyncSandbox(server=server.url, api_key=ann.key, setup=["echo why; exit 1"]).create()
    assert failed.value.output == "why\n"


def refusals(metrics: str) -> int:
    found = re.search(r"^atoll_quota_refusals_total (\d+)\.0$", metrics, re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_refusals_are_among_the_figures(server: RunningServer, admin: httpx.Client) -> None:
    assert admin.post("/users", json={"id": "full", "quotas": {"max_sandboxes": 0}}).status_code == 201
    key = admin.post("/keys", json={"user_id": "full", "name": "k", "scopes": ["read", "use", "manage"]}).json()["key"]
    before = refusals(admin.get("/metrics").text)
    with server.client(key) as client:
        assert client.post("/sandboxes").status_code == 429
    text = admin.get("/metrics").text
    assert refusals(text) == before + 1
    assert "# TYPE atoll_limit_refusals_total counter" in text
    assert "atoll_sandboxes_not_deleted 0" in text


@pytest.mark.timeout(180)
def test_the_command_line_knows_tasks_setup_files_and_export(
    server: RunningServer, ann: Person, client: httpx.Client, tmp_path: Path
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    environment = {**kept, "ATOLL_URL": server.url, "ATOLL_API_KEY": ann.key}

    def atoll(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    described = tmp_path / "box.toml"
    described.write_text('timeout = 3600\ntaskId = "of-file"\nsetup = ["mkdir out", "echo 6 > out/n"]\n')
    made = atoll("create", "--file", str(described))
    assert made.returncode == 0, made.stderr
    assert client.get("/sandboxes/of-file").json()["id"] == made.stdout.strip()
    removed = atoll("rm", "of-file", "--export", str(tmp_path / "results"), "--export-from", "out")
    assert removed.returncode == 0, removed.stderr
    assert (tmp_path / "results/of-file/n").read_text() == "6\n"
    assert client.get("/sandboxes/of-file").status_code == 404
    failed = atoll("create", "--task", "t", "--setup", "true", "--setup", "echo why; exit 4")
    assert failed.returncode == 125
    assert failed.stderr.startswith("why\natoll: ")
    assert "setup command 2 of 2" in failed.stderr
