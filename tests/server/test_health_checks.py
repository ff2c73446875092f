"""STARTING until what a sandbox was started for answers, and ERROR with the reason if it does not."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx

from server.running import RunningServer, running_server, start_server
from server.waiting import WEB, events, launch, run, start, until

PORT = {"name": "AGENT_SERVER", "port": 8000}


def state(api: httpx.Client, sandbox_id: str) -> dict[str, Any]:
    return dict(api.get(f"/sandboxes/{sandbox_id}").json())


def test_it_is_starting_until_its_path_answers(api: httpx.Client) -> None:
    api.delete("/sandbox-specs/healthy")
    waits = "until [ -e go ]; do sleep 0.05; done; exec python3 web.py 8000"
    spec = {"id": "healthy", "command": ["sh", "-c", waits], "exposed_ports": [PORT], "health": {"grace_s": 60}}
    assert api.post("/sandbox-specs", json=spec).json()["health"] == {
        "path": "/health",
        "port": "AGENT_SERVER",
        "grace_s": 60.0,
    }
    info = start(api, sandbox_spec_id="healthy")
    assert (info["status"], info["state"]) == ("STARTING", "RUNNING")
    assert (info["session_api_key"], info["exposed_urls"]) == (None, None)
    found = [each["id"] for each in api.get("/sandboxes/search", params={"status": "STARTING"}).json()["items"]]
    assert found == [info["id"]]
    assert api.get(f"/sandboxes/{info['id']}/wait", params={"timeout": 0.3}).status_code == 504
    for name, content in (("web.py", WEB), ("go", "")):
        api.put(f"/sandboxes/{info['id']}/files/content", params={"path": name}, content=content).raise_for_status()
    ready = api.get(f"/sandboxes/{info['id']}/wait", params={"timeout": 30})
    assert (ready.status_code, ready.json()["status"]) == (200, "RUNNING")
    assert ready.json()["session_api_key"]
    assert [url["name"] for url in ready.json()["exposed_urls"]] == ["AGENT_SERVER"]
    (event,) = events(api, info["id"], "health")
    assert event["data"] == {"status": "RUNNING"}


def test_after_the_grace_period_it_is_an_error_until_it_answers_after_all(api: httpx.Client) -> None:
    health = {"port": 8000, "path": "/alive", "grace_s": 0.5}
    info = start(api, health=health)
    failed = until(lambda: (found := state(api, info["id"]))["status"] == "ERROR" and found)
    assert failed["reason"] == "/alive on port 8000 was not healthy within 0.5 s: connection refused"
    assert (failed["session_api_key"], failed["state"]) == (None, "RUNNING")
    gone = api.get(f"/sandboxes/{info['id']}/wait")
    assert gone.status_code == 410
    assert "connection refused" in gone.json()["detail"]
    assert run(api, info["id"], "echo still usable") == "still usable\n"
    launch(api, info["id"], WEB, "8000")
    until(lambda: state(api, info["id"])["status"] == "RUNNING")
    assert [event["data"]["status"] for event in events(api, info["id"], "health")] == ["ERROR", "RUNNING"]


def test_it_is_an_error_at_once_when_the_command_dies(api: httpx.Client) -> None:
    api.delete("/sandbox-specs/dying")
    command = ["sh", "-c", "echo cannot open the database >&2; exit 7"]
    spec = {"id": "dying", "command": command, "exposed_ports": [PORT], "health": {"grace_s": 3000}}
    assert api.post("/sandbox-specs", json=spec).status_code == 201
    info = start(api, sandbox_spec_id="dying")
    assert api.get(f"/sandboxes/{info['id']}/wait", params={"timeout": 30}).status_code == 410
    failed = state(api, info["id"])
    assert failed["status"] == "ERROR"
    assert failed["reason"] == "the command of its spec ended with exit code 7: cannot open the database"
    (event,) = until(lambda: events(api, info["id"], "health"))
    assert (event["data"], event["reason"]) == ({"status": "ERROR"}, failed["reason"])


def test_a_command_that_dies_later_takes_the_session_key_along(api: httpx.Client, native_server: RunningServer) -> None:
    api.delete("/sandbox-specs/mortal")
    spec = {"id": "mortal", "command": ["python3", "-c", WEB, "8000"], "exposed_ports": [PORT], "health": {}}
    assert api.post("/sandbox-specs", json=spec).status_code == 201
    info = start(api, sandbox_spec_id="mortal")
    key = api.get(f"/sandboxes/{info['id']}/wait").json()["session_api_key"]
    with native_server.client("", **{"X-Session-API-Key": key}) as session:
        assert session.get("/sandboxes/by-session-key").json()["id"] == info["id"]
        api.post(f"/sandboxes/{info['id']}/commands/spec-command/kill", json={}).raise_for_status()
        until(lambda: state(api, info["id"])["status"] == "ERROR")
        assert session.get("/sandboxes/by-session-key").status_code == 401


def test_a_fork_has_ports_and_a_callback_of_its_own_and_no_check(api: httpx.Client) -> None:
    info = start(api, exposed_ports=[PORT], health={"grace_s": 600}, callback=True)
    answer = api.post(f"/sandboxes/{info['id']}/fork", json={"count": 2})
    assert answer.status_code == 201, answer.text
    for fork in answer.json():
        assert (fork["status"], [url["port"] for url in fork["exposed_urls"]]) == ("RUNNING", [8000])
        assert run(api, fork["id"], "echo $OH_WEBHOOKS_0_BASE_URL").endswith(f"/webhooks/{fork['id']}\n")


def test_ports_and_checks_survive_a_server_that_is_killed(session_folder: Path) -> None:
    folder = session_folder / "killed-while-starting"
    first = start_server(folder, "bubblewrap")
    with first.client() as client:
        info = start(client, health={"port": 8000, "grace_s": 600})
        client.post(f"/sandboxes/{info['id']}/ports", json={"name": "WEB", "port": 8000}).raise_for_status()
    first.stop(signal.SIGKILL)
    first.close()
    with running_server(folder, "bubblewrap") as second, second.client() as client:
        assert state(client, info["id"])["status"] == "STARTING"
        launch(client, info["id"], WEB, "8000")
        until(lambda: state(client, info["id"])["status"] == "RUNNING")
        assert run(client, info["id"], "echo $WEB") == "8000\n"
        assert client.get(f"/sandboxes/{info['id']}/ports/8000/").status_code == 200


HOSTILE = """
import socket, sys, threading
def serve(port, answer):
    listening = socket.create_server(("127.0.0.1", port))
    while True:
        connection = listening.accept()[0]
        threading.Thread(target=answer, args=(connection,), daemon=True).start()
held = []
def never(connection): held.append(connection)
def endless(connection):
    while True: connection.sendall(b"x" * 65536)
threading.Thread(target=serve, args=(8001, never), daemon=True).start()
serve(8002, endless)
"""


def test_what_answers_never_or_without_end_delays_nobody(api: httpx.Client) -> None:
    bad = [start(api, health={"port": port, "grace_s": 0.2}) for port in (8001, 8001, 8001, 8002)]
    for info in bad:
        launch(api, info["id"], HOSTILE)
    good = start(api, health={"port": 8000, "grace_s": 60})
    launch(api, good["id"], WEB, "8000")
    until(lambda: state(api, good["id"])["status"] == "RUNNING")
    reasons = [until(lambda: state(api, info["id"])["reason"]) for info in bad]  # noqa: B023
    assert all("was not healthy within 0.2 s" in reason for reason in reasons)


def test_a_check_that_cannot_be_made_is_refused(api: httpx.Client) -> None:
    for health in ({"port": "NO_SUCH"}, {"port": 0}, {"path": "no-slash"}, {"path": "/a b"}, {"path": "/a\r\nX: y"}):
        wrong = {"port": 8000, **health}
        assert api.post("/sandboxes", json={"health": wrong}).status_code in (400, 422), health
        assert api.post("/sandbox-specs", json={"id": "wrong", "health": wrong}).status_code in (400, 422), health
    assert api.post("/sandboxes", json={"health": {"port": 8000, "grace_s": 0}}).status_code == 422
