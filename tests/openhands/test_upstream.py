"""OpenHands's own `RemoteSandboxService`, unmodified, on a real server: `upstream_program.py` drives it.

It needs Python 3.12 and some 300 packages, so it runs only where ATOLL_TEST_OPENHANDS names the Python of an
environment in which `openhands-ai` is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.settings import Settings
from needs import not_applicable
from server.running import everything, new_folder, running_server
from server.test_runtime import ECHO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).with_name("upstream_program.py")


def drive(python: str, folder: Path, url: str, key: str, *arguments: str) -> dict[str, Any]:
    """What the program finds out."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "RUNTIME": "remote",
        "SANDBOX_API_KEY": key,
        "SANDBOX_REMOTE_RUNTIME_API_URL": f"{url}/runtime",
        "OH_PERSISTENCE_DIR": str(folder / "persistence"),
        "WEB_HOST": "openhands.example",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would look for it on the network
    }
    command = [python, str(PROGRAM), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(next(each for each in done.stdout.splitlines() if each.startswith("SAID "))[5:])
    return found


@pytest.fixture(scope="module")
def said(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> Iterator[dict[str, Any]]:
    python = os.environ.get("ATOLL_TEST_OPENHANDS")
    if not python:
        not_applicable("ATOLL_TEST_OPENHANDS names no Python that has openhands-ai")
    need_engine("native", session_settings)
    with running_server(new_folder(session_folder, "openhands"), "native", ATOLL_RUNTIME_NETWORK="none") as server:
        assert server.key is not None
        with server.client() as admin:
            assert admin.post("/users", json={"id": "openhands"}).status_code == 201
            made = admin.post("/keys", json={"user_id": "openhands", "scopes": ["read", "use", "manage"]})
        result = drive(python, session_folder, server.url, made.json()["key"], json.dumps(["python3", "-c", ECHO]))
        with server.client() as admin:
            result["left on the server"] = everything(admin)
        yield result


def test_it_starts_finds_and_counts(said: dict[str, Any]) -> None:
    first, chosen = said["started"]
    assert chosen["id"] == "chosen-by-alice"
    assert (first["status"], first["created_by_user_id"], first["sandbox_spec_id"]) == ("RUNNING", "alice", "host")
    assert [each["id"] for each in said["search"]] == [chosen["id"], first["id"]]
    assert [each and each["id"] for each in said["batch"]] == [first["id"], None, chosen["id"]]
    assert {each["status"] for each in (*said["search"], said["running"])} == {"RUNNING"}
    assert said["others"] == [None, False], "another of its users has no part in it"


def test_its_session_key_is_known_only_while_the_sandbox_runs(said: dict[str, Any]) -> None:
    first = said["running"]
    assert [each and each["id"] for each in said["by key"]] == [first["id"], None, None]
    assert said["validated"]["id"] == said["by key after"]["id"] == first["id"]
    assert said["key while paused"] == "401"


def test_the_urls_that_it_derives_lead_to_the_ports_inside(said: dict[str, Any]) -> None:
    ports = {"AGENT_SERVER": 60000, "VSCODE": 60001, "WORKER_1": 12000, "WORKER_2": 12001}
    assert {name: answer[1]["port"] for name, answer in said["urls"].items()} == ports
    assert all(answer[0] == 200 and answer[1]["good"] for answer in said["urls"].values())
    assert said["urls"]["VSCODE"][1]["path"].startswith("/?tkn=")
    assert said["urls"]["AGENT_SERVER"][1]["mine"] == "yes"
    assert said["without key"][0] == 401


def test_it_pauses_and_resumes(said: dict[str, Any]) -> None:
    assert said["paused"] == said["resumed"] == [True, False]
    assert said["while paused"]["status"] == "PAUSED"
    assert (said["while paused"]["session_api_key"], said["while paused"]["exposed_urls"]) == (None, None)
    assert said["after"] == said["running"]
    assert said["url after"][0] == 200


def test_at_its_cap_the_oldest_is_paused(said: dict[str, Any]) -> None:
    first, chosen = (each["id"] for each in said["started"])
    assert said["at the cap"] == {first: "PAUSED", chosen: "RUNNING", said["third"]: "RUNNING"}


def test_its_own_routes_and_poller_work_over_it(said: dict[str, Any]) -> None:
    answers = said["by its routes"]
    assert [each and each["id"] for each in answers["batch"]] == [answers["start"]["id"], None]
    assert answers["pause"] == answers["resume"] == {"success": True}
    assert (answers["delete"], answers["again"]) == (200, 404)
    assert said["poller"] == [False, []]


def test_what_fails_says_so_and_nothing_is_left(said: dict[str, Any]) -> None:
    assert "SandboxError" in said["no image"]
    assert said["deleted"]
    assert all(said["deleted"])
    assert said["left"] == said["left on the server"] == []
