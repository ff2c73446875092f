"""The log of a server: one line for each request, with ids, and nothing that is secret or that its reader must obey."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from atoll.server import problems
from atoll.server.middleware.request_record import RequestRecord
from atoll.settings import Settings
from server.conftest import Person, new_user
from server.running import RunningServer, new_folder, running_server
from server.test_hostile import dial
from server.waiting import until

_PIPE_BYTES = 4096
LONGEST_LINE = 30_000


@pytest.fixture(scope="module")
def logged(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> Iterator[RunningServer]:
    """A server that logs all it can."""
    need_engine("bubblewrap", session_settings)
    variables = {"ATOLL_LOG_LEVEL": "debug", "ATOLL_PROT": "1", "ATOLL_NETWORK_UPLINK": ""}
    with running_server(new_folder(session_folder, "logged"), "bubblewrap", **variables) as server:
        yield server


@pytest.fixture(scope="module")
def kim(logged: RunningServer) -> Person:
    with logged.client() as admin:
        return new_user(admin, "kim")


@pytest.fixture
def client(logged: RunningServer, kim: Person) -> Iterator[httpx.Client]:
    with logged.client(kim.key) as client:
        yield client
        for info in client.get("/sandboxes/search").json()["items"]:
            client.delete(f"/sandboxes/{info['id']}")


def lines(server: RunningServer) -> list[dict[str, Any]]:
    """Every line of the log that is complete; each has to be JSON."""
    text = (server.folder / "log").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def line_of(server: RunningServer, request_id: str) -> dict[str, Any]:
    """The line about a request, which is written just after its answer."""

    def found() -> list[dict[str, Any]]:
        return [each for each in lines(server) if each.get("request_id") == request_id and each["event"] == "request"]

    [line] = until(found)
    return line


def test_every_request_leaves_a_line_that_says_whose_it_was(logged: RunningServer, client: httpx.Client) -> None:
    made = client.post("/sandboxes")
    sandbox_id = made.json()["id"]
    ran = client.post(f"/sandboxes/{sandbox_id}/exec", json={"command": "true"}, headers={"X-Request-ID": "run-1"})
    for answer, method, route in (
        (made, "POST", "/sandboxes"),
        (ran, "POST", "/sandboxes/{sandbox_id}/exec"),
    ):
        line = line_of(logged, answer.headers["X-Request-ID"])
        assert {"level": "info", "method": method, "route": route, "status": answer.status_code}.items() <= line.items()
        assert (line["user_id"], line["sandbox_id"]) == ("kim", sandbox_id)
        assert 0 < line["duration_s"] < 60
    assert ran.headers["X-Request-ID"] == "run-1"
    health = line_of(logged, client.get("/health").headers["X-Request-ID"])
    assert (health["level"], health.get("user_id")) == ("debug", None)


@pytest.mark.parametrize(
    "given",
    ["", "a b", "x" * 129, 'x","level":"error', "caf\u00e9", "atoll_0123456789ab_secret", "token=a1"],
)
def test_an_id_that_could_be_misread_is_replaced(logged: RunningServer, given: str) -> None:
    with logged.client("") as nobody:
        headers = [(b"X-Request-ID", given.encode("latin-1"))]
        answer = nobody.get("/sandboxes/search", headers=headers)
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["X-Request-ID"])
    assert answer.json()["request_id"] == answer.headers["X-Request-ID"]


def test_a_failure_and_a_stream_carry_the_id_too(logged: RunningServer, kim: Person, client: httpx.Client) -> None:
    missing = client.get(f"/sandboxes/{'0' * 24}", headers={"X-Request-ID": "gone-1"})
    assert (missing.status_code, missing.json()["request_id"]) == (404, "gone-1")
    sandbox = f"/sandboxes/{client.post('/sandboxes').json()['id']}"
    headers = {"X-Request-ID": "stream-1"}
    with client.stream("POST", f"{sandbox}/exec/stream", json={"command": "echo a"}, headers=headers) as answer:
        assert answer.headers["X-Request-ID"] == "stream-1"
        assert b'"exit"' in answer.read()
    url = f"ws{logged.url.removeprefix('http')}/api/v1{sandbox}/terminal?command=true"
    headers = {"X-Request-ID": "socket-1", "Authorization": f"Bearer {kim.key}"}
    with connect(url, additional_headers=headers, proxy=None) as opened:
        assert opened.response is not None
        assert opened.response.headers["X-Request-ID"] == "socket-1"
        for _ in opened:
            pass
    with pytest.raises(InvalidStatus) as refused:
        connect(url, additional_headers={"X-Request-ID": "socket-2"}, proxy=None)
    assert refused.value.response.headers["X-Request-ID"] == "socket-2"
    assert line_of(logged, "socket-1")["status"] == 101
    assert line_of(logged, "socket-2")["status"] == 401


def test_a_client_that_vanishes_leaves_a_line(logged: RunningServer, kim: Person, client: httpx.Client) -> None:
    sandbox = client.post("/sandboxes").json()["id"]
    body = json.dumps({"command": "echo started; sleep 31415"})
    head = f"POST /api/v1/sandboxes/{sandbox}/exec/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {kim.key}\r\n"
    with dial(logged) as sock:
        more = (
            f"X-Request-ID: vanished-1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        )
        sock.sendall(f"{head}{more}".encode())
        received = b""
        while b"started\\n" not in received:
            received += sock.recv(4096)
    line = line_of(logged, "vanished-1")
    assert (line["incomplete"], line["sandbox_id"], line["user_id"]) == (True, sandbox, "kim")


def test_nothing_secret_is_logged_at_any_level(logged: RunningServer, kim: Person, client: httpx.Client) -> None:
    """Requests with every kind of credential, good and bad, of which most fail in some way."""
    made = client.post("/sandboxes").json()
    sandbox, session_key = f"/sandboxes/{made['id']}", made["session_api_key"]
    secrets = [kim.key, session_key, "tok3n-in-query", "b4sic-secret", "regi5try-password", "inj3cted-header"]
    secrets += [
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJldmUifQ.c2lnbmF0dXJl",
        "env-s3cret",
        "5ec4e7",
        "h00k-path",
        "c00kie",
    ]
    token = secrets[6]
    with logged.client("") as nobody:
        for authorization in (f"Bearer {kim.key}x", f"Bearer {token}", "Basic b4sic-secret", f"Bearer {session_key}0"):
            assert nobody.get("/sandboxes/search", headers={"Authorization": authorization}).status_code == 401
        for path in (sandbox, "/nowhere", "/sandboxes/by-session-key"):
            nobody.get(path, headers={"X-Session-API-Key": session_key, "Cookie": "a=c00kie"})
            nobody.get(path, params={"session_api_key": session_key, "token": "tok3n-in-query"})
    login = {"username": "kim", "password": "regi5try-password"}
    rules = {"allowed_domains": ["a.test"], "inject": [{"domain": "a.test", "headers": {"X-Key": "inj3cted-header"}}]}
    for wanted in (
        {"settings": {"image": "registry.invalid/a:b"}, "registry_login": login},
        {"settings": {"network": rules}},
        {"settings": {"network": {**rules, "nonsense": 1}}},
        {"settings": {"env": {"PASSWORD": "env-s3cret"}, "memory": "env-s3cret"}},
        {"settings": {"env": {"PASSWORD": "env-s3cret"}, "setup": ["echo $PASSWORD >&2; exit 3"]}},
    ):
        assert client.post("/sandboxes", json=wanted).status_code >= 400
    client.post(f"{sandbox}/exec", json={"command": "echo $A", "env": {"A": "env-s3cret"}, "timeout_s": 20})
    hook = {"url": "http://127.0.0.1:1/h00k-path?token=tok3n-in-query", "secret": "5ec4e7" * 12}
    assert client.put("/webhooks", json=hook).json()["detail"].startswith("the URL did not answer")
    url = f"ws{logged.url.removeprefix('http')}/api/v1{sandbox}/terminal?command=true&token=tok3n-in-query"
    for key in (kim.key, f"{kim.key}x"):
        with contextlib.suppress(InvalidStatus):
            with connect(url, subprotocols=[f"atoll.bearer.{key}"], proxy=None):  # type: ignore[list-item]
                pass
    line_of(logged, client.get("/info").headers["X-Request-ID"])
    text = (logged.folder / "log").read_text()
    assert "h00k-path" not in text
    assert [line for line in text.splitlines() if any(secret in line for secret in secrets)] == []
    assert any(each["event"].startswith("the webhook") and each["user_id"] == "kim" for each in lines(logged))


def test_hostile_content_stays_inside_its_line(logged: RunningServer, client: httpx.Client) -> None:
    forged = 'x\n{"event": "forged", "level": "error"}\r\n\x1b]0;owned\x07\x9b31m\u2028\u202e'
    big = "m" * 1_000_000
    sandbox = f"/sandboxes/{client.post('/sandboxes').json()['id']}"
    for name in (forged, big):
        client.post("/sandboxes", json={"name": name})
        client.put("/webhooks", json={"url": f"http://127.0.0.1:1/{name}", "secret": "5e" * 32})
        client.post(f"{sandbox}/exec", json={"command": name[:9000], "timeout_s": 20})
        client.get(f"{sandbox}/files/content", params={"path": name[:9000]})
    client.get(f"/nowhere/{quote(forged)}")
    line_of(logged, client.get("/info").headers["X-Request-ID"])
    raw = (logged.folder / "log").read_bytes()
    assert {byte for byte in raw if byte < 0x20 or byte > 0x7E} == {0x0A}
    assert max(map(len, raw.splitlines())) < LONGEST_LINE
    assert all(each["event"] != "forged" for each in lines(logged))


def test_layers_below_and_warnings_have_the_same_form(logged: RunningServer) -> None:
    found = {each.get("logger", ""): each for each in lines(logged)}
    assert {"atoll.manager.recovery", "atoll.server.serve"} <= found.keys()
    assert "did you mean ATOLL_PORT?" in found["atoll.server.serve"]["event"]
    assert all({"timestamp", "level", "event"} <= each.keys() for each in lines(logged))


@pytest.mark.slow
def test_a_reader_that_stopped_holds_nothing_up_and_nothing_is_lost(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> None:
    """Its stderr is a full pipe for 60 requests. What it had to say comes when somebody reads again, or at its end."""
    need_engine("bubblewrap", session_settings)
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        with running_server(
            new_folder(session_folder, "unread"), "bubblewrap", log=f"/proc/self/fd/{writing}"
        ) as server:
            os.close(writing)
            with server.client() as admin:
                for number in range(60):
                    answer = admin.get("/info", headers={"X-Request-ID": f"r-{number}"})
                    assert answer.status_code == 200
                    assert admin.get("/health").status_code == 200  # not logged at this level
            read = b""
            while b'"r-30"' not in read:
                read += os.read(reading, 65536)
            server.process.terminate()
            while piece := os.read(reading, 65536):
                read += piece
            assert server.process.wait(30) == 0
    finally:
        os.close(reading)
    found = [json.loads(line) for line in read.splitlines()]
    assert [each["request_id"] for each in found if each["route"] == "/info"] == [f"r-{n}" for n in range(60)]
    assert not [each for each in found if each["route"] == "/health"]


async def test_an_unexpected_failure_is_logged_once_and_found_by_its_id(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    problems.install(app)
    app.add_middleware(RequestRecord)

    @app.get("/fails")
    async def fails() -> None:
        raise RuntimeError("nobody expected this")

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.get("/fails", headers={"X-Request-ID": "fails-1"})
    assert (answer.status_code, answer.json()["code"]) == (500, "server_error")
    assert answer.headers["X-Request-ID"] == answer.json()["request_id"] == "fails-1"
    [record] = caplog.records
    assert record.exc_info is not None
    assert "nobody expected this" not in answer.text
