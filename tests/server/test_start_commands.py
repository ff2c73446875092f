"""Start commands, ready checks and sudo in requests and specs, and how their failures are answered."""

from __future__ import annotations

from typing import Any

import httpx

from server.waiting import run, start, until

UP = {"name": "up", "command": "echo up; touch up; exec sleep 1000"}


def test_the_answer_comes_when_it_is_ready(api: httpx.Client) -> None:
    info = start(api, start=[UP], ready="test -e up")
    assert run(api, info["id"], "ls up") == "up\n"
    (command,) = api.get(f"/sandboxes/{info['id']}/commands").json()["items"]
    assert command == {"id": "up", "state": "running", "restarts": 0, "exit_code": None}
    api.post(f"/sandboxes/{info['id']}/commands/up/kill", json={"signal": 15}).raise_for_status()

    def again() -> bool:
        (found,) = api.get(f"/sandboxes/{info['id']}/commands").json()["items"]
        return (found["restarts"], found["state"], found["exit_code"]) == (1, "running", 143)

    until(again)
    api.delete(f"/sandboxes/{info['id']}")


def test_a_failure_has_the_output_of_the_commands(api: httpx.Client) -> None:
    before = len(api.get("/sandboxes/search").json()["items"])
    wanted = {"start": ["echo no database >&2; exit 3"], "ready": {"port": 9, "timeout": 0.5}}
    answer = api.post("/sandboxes", json=wanted)
    assert (answer.status_code, answer.json()["code"]) == (422, "start_failed")
    assert "not ready within 0.5 s: port 9: connection refused" in answer.json()["detail"]
    assert answer.json()["output"].startswith("no database\n")
    assert len(api.get("/sandboxes/search").json()["items"]) == before


def test_what_is_no_command_and_no_check_is_refused(api: httpx.Client) -> None:
    refused: tuple[dict[str, Any], ...] = (
        {"start": "sleep 1"},
        {"start": [{"name": "../x", "command": "true"}]},
        {"start": [{"name": "a", "command": "true"}, {"name": "a", "command": "true"}]},
        {"start": ["true"] * 17},
        {"start": [[]]},
        {"ready": {"port": 70000}},
        {"ready": {"path": "/x"}},
        {"ready": {"port": 80, "path": "/a b"}},
        {"ready": {"command": "true", "port": 80}},
        {"ready": {"command": "true", "timeout": 1e9}},
    )
    for wanted in refused:
        assert api.post("/sandboxes", json=wanted).status_code == 422, wanted


def test_a_spec_of_the_catalogue_has_them_too(api: httpx.Client) -> None:
    api.delete("/sandbox-specs/starting")
    settings = {"start": [UP], "ready": {"command": "test -e up"}}
    assert api.post("/sandbox-specs", json={"id": "starting", "settings": settings}).status_code == 201
    info = start(api, sandbox_spec_id="starting")
    assert run(api, info["id"], "ls up") == "up\n"
    api.delete(f"/sandboxes/{info['id']}")
    api.delete("/sandbox-specs/starting")
