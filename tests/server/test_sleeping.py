"""Idle sandboxes, leases, shells and commands of specs, on a server that is restarted."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll import Sandbox, SandboxPausedError
from atoll.settings import Settings
from server.running import RunningServer, new_folder, running_server, start_server


def _until(ask: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := ask()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def native(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> Iterator[RunningServer]:
    """One that pauses what nobody used for a moment."""
    need_engine("native", session_settings)
    folder = new_folder(session_folder, "sleeping")
    with running_server(folder, "native", ATOLL_CLOSE_DELAY="2", ATOLL_ON_IDLE="pause") as server:
        yield server


@pytest.fixture
def api(native: RunningServer) -> Iterator[httpx.Client]:
    with native.client() as client:
        yield client
        for info in client.get("/sandboxes/search").json()["items"]:
            client.delete(f"/sandboxes/{info['id']}")


def _start(api: httpx.Client) -> str:
    answer = api.post("/sandboxes")
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def _asleep(api: httpx.Client, path: str) -> dict[str, Any]:
    def paused() -> dict[str, Any] | None:
        info: dict[str, Any] = api.get(path).json()
        return info if info["state"] == "PAUSED" else None

    found: dict[str, Any] = _until(paused)
    assert found["paused_by"] == "idle"
    return found


def test_an_idle_sandbox_sleeps_and_is_woken_by_rest_a_session_key_and_the_sdk(
    native: RunningServer, api: httpx.Client, session_settings: Settings
) -> None:
    path = f"/sandboxes/{_start(api)}"
    session = api.get(path).json()["session_api_key"]
    _asleep(api, path)
    assert api.post(f"{path}/exec", json={"command": "echo on"}).json()["stdout"] == "on\n"
    _asleep(api, path)
    with native.client("", **{"X-Session-API-Key": session}) as stranger:
        assert stranger.get(f"{path}/files").status_code == 200
    _asleep(api, path)
    sandbox = Sandbox.attach(path.rpartition("/")[2], server=native.url, api_key=native.key, settings=session_settings)
    assert sandbox.exec("echo one").stdout == "one\n"
    _asleep(api, path)
    assert sandbox.exec("echo two").stdout == "two\n"  # on the connection that is still open
    sandbox.detach()


def test_one_that_its_user_paused_says_so_to_everybody(
    native: RunningServer, api: httpx.Client, session_settings: Settings
) -> None:
    id = _start(api)
    sandbox = Sandbox.attach(id, server=native.url, api_key=native.key, settings=session_settings)
    assert sandbox.exec("true").success
    assert api.post(f"/sandboxes/{id}/pause").status_code == 200
    started = time.monotonic()
    answer = api.post(f"/sandboxes/{id}/exec", json={"command": "true"})
    assert (answer.status_code, answer.json()["code"]) == (409, "sandbox_paused")
    with pytest.raises(SandboxPausedError):
        sandbox.exec("true", timeout=2)
    with pytest.raises(SandboxPausedError):
        sandbox.list_files()
    assert time.monotonic() - started < 8
    sandbox.resume()
    assert sandbox.exec("echo on").stdout == "on\n"
    sandbox.detach()


def test_a_lease_keeps_it_awake(native: RunningServer, api: httpx.Client, session_settings: Settings) -> None:
    kept, other = (_start(api) for _ in range(2))
    sandbox = Sandbox.attach(kept, server=native.url, api_key=native.key, settings=session_settings)
    sandbox.keep_alive(1000)
    sandbox.detach()
    _asleep(api, f"/sandboxes/{other}")
    _asleep(api, f"/sandboxes/{other}")
    info = api.get(f"/sandboxes/{kept}").json()
    assert info["state"] == "RUNNING"
    assert info["leased_until"] is not None
    assert api.post(f"/sandboxes/{kept}/keep-alive", json={"seconds": 86401}).status_code == 422


@pytest.mark.usefixtures("server")
def test_the_shell_and_what_it_knows_outlive_the_server(session_folder: Path) -> None:
    folder = session_folder / "shells"
    first = start_server(folder)
    with first.client() as client:
        id = client.post("/sandboxes").json()["id"]
        for shell, word in (("default", "one"), ("other", "two")):
            typed = {"command": f"cd /tmp; x={word}; f() {{ echo $x $PWD; }}; for i in 1 2 3; do echo $i; done"}
            assert client.post(f"/sandboxes/{id}/shell", json={**typed, "shell": shell}).json()["success"]
        busy = {"command": "y=3; touch /tmp/begun; sleep 500", "shell": "busy", "timeout_s": 600}
        request = client.build_request("POST", f"/sandboxes/{id}/shell", json=busy)
        with pytest.raises(httpx.ReadTimeout):
            client.send(_with_timeout(request, 1.0))
    first.stop(signal.SIGKILL)
    second = start_server(folder)
    try:
        with second.client() as client:
            for shell, word in (("default", "one"), ("other", "two")):
                answer = client.post(f"/sandboxes/{id}/shell", json={"command": "f", "shell": shell}).json()
                assert (answer["stdout"], answer["exit_code"]) == (f"{word} /tmp\n", 0)
            assert client.delete(f"/sandboxes/{id}").status_code == 200
    finally:
        assert second.stop() == 0
        for server in (first, second):
            server.close()


def _with_timeout(request: httpx.Request, seconds: float) -> httpx.Request:
    request.extensions = {**request.extensions, "timeout": dict.fromkeys(("connect", "read", "write", "pool"), seconds)}
    return request


def test_the_end_of_a_specs_command_is_reported(client: httpx.Client, admin: httpx.Client) -> None:
    for name, line in (("dies", "echo starting; echo no such thing >&2; exit 3"), ("lives", "sleep 1000")):
        spec = {"id": f"command-{name}", "command": ["sh", "-c", line], "shared": True}
        assert admin.post("/sandbox-specs", json=spec).status_code == 201
    dead, alive = (
        client.post("/sandboxes", params={"sandbox_spec_id": f"command-{name}"}).json()["id"]
        for name in ("dies", "lives")
    )
    end = _until(lambda: client.get(f"/sandboxes/{dead}").json()["command_end"])
    assert (end["exit_code"], end["cause"]) == (3, "exit")
    assert "no such thing" in end["output"]
    said = "the command of its spec ended with exit code 3: starting no such thing"
    assert said in client.get(f"/sandboxes/{dead}/logs").text
    assert any(event["reason"] == said for event in client.get("/events", params={"sandbox_id": dead}).json()["items"])
    info = client.get(f"/sandboxes/{alive}").json()
    assert (info["state"], info["command_end"]) == ("RUNNING", None)
