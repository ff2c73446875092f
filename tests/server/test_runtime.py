"""The runtime API below /runtime, as OpenHands's remote back end uses it: sessions of one user, and their URLs."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from server.conftest import Person
from server.running import RunningServer, everything, validate

ECHO = """
import http.server, json, os, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        key = os.environ["OH_SESSION_API_KEYS_0"]
        good = self.headers.get("X-Session-API-Key") == key == os.environ["SESSION_API_KEY"]
        said = json.dumps({"port": self.server.server_port, "path": self.path, "good": good,
                           "mine": os.environ.get("MINE"), "folder": os.getcwd()})
        if self.path == "/alive": said = json.dumps({"key": self.headers.get("X-Session-API-Key")})
        self.send_response(200 if good or self.path == "/alive" else 401)
        self.send_header("Access-Control-Allow-Origin", "*")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said.encode())
    do_GET = do_POST = answer
    log_message = lambda *_: None
for port in (60000, 60001, 12000, 12001):
    made = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=made.serve_forever).start()
"""
SERVES: dict[str, Any] = {"image": "host", "command": ["python3", "-c", ECHO], "environment": {"MINE": "yes"}}
IDLES: dict[str, Any] = {"image": "host", "command": ["sleep", "1000"]}


def runtime_client(server: RunningServer, key: str) -> httpx.Client:
    headers = {"X-API-Key": key} if key else {}
    hooks = {"response": [validate]}
    return httpx.Client(
        base_url=f"{server.url}/runtime", headers=headers, timeout=30, event_hooks=hooks, trust_env=False, verify=False
    )


@pytest.fixture
def runtime(server: RunningServer, ann: Person, client: httpx.Client) -> Iterator[httpx.Client]:
    """Ann's. What she starts is deleted after the test."""
    with runtime_client(server, ann.key) as made:
        yield made


@pytest.fixture
def start(runtime: httpx.Client) -> Callable[..., dict[str, Any]]:
    def start(what: dict[str, Any] = IDLES, **more: object) -> dict[str, Any]:
        answer = runtime.post("/start", json={"session_id": f"s{secrets.token_hex(8)}", **what, **more})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    return start


def ask(url: str, key: str | None = None, **headers: str) -> httpx.Response:
    """Until it listens."""
    deadline = time.monotonic() + 30
    headers = {**({"X-Session-API-Key": key} if key else {}), **headers}
    while (answer := httpx.get(url, headers=headers, trust_env=False, verify=False)).status_code == 502:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return answer


def test_a_session_is_its_users_own_and_starts_once(
    server: RunningServer, runtime: httpx.Client, bob: Person, admin: httpx.Client
) -> None:
    wanted = {"session_id": "of-ann", **IDLES, "environment": {"A": "1"}}
    first, again = runtime.post("/start", json=wanted).json(), runtime.post("/start", json=wanted).json()
    assert first == again
    assert first["session_id"] == "of-ann"
    assert runtime.get("/sessions/of-ann").json() == first
    assert runtime.get(f"/runtime/{first['runtime_id']}").json() == first
    for changed in ({"environment": {"A": "2"}}, {"command": ["sleep", "2"]}, {"run_as_user": 5}):
        other = runtime.post("/start", json={**wanted, **changed})
        assert (other.status_code, other.json()["code"]) == (409, "conflict")
    assert server.key is not None
    for key in (bob.key, server.key):
        with runtime_client(server, key) as theirs:
            assert theirs.get("/sessions/of-ann").status_code == 404
            assert theirs.get(f"/runtime/{first['runtime_id']}").status_code == 404
            assert theirs.get("/sessions/batch", params={"ids": "of-ann"}).json() == [None]
            assert theirs.get("/list").json() == {"runtimes": []}
            for act in ("pause", "resume", "stop"):
                refused = theirs.post(f"/{act}", json={"runtime_id": first["runtime_id"]})
                assert (refused.status_code, refused.json()["code"]) == (404, "session_not_found")
            made = theirs.post("/start", json=wanted).json()
            assert made["runtime_id"] not in (None, first["runtime_id"])
            assert theirs.post("/stop", json={"runtime_id": made["runtime_id"]}).status_code == 200
    assert runtime.get("/sessions/of-ann").json() == first


def test_it_pauses_resumes_and_stops(runtime: httpx.Client, start: Callable[..., dict[str, Any]]) -> None:
    made = start()
    chosen = {"runtime_id": made["runtime_id"]}
    assert (made["status"], made["pod_status"]) == ("running", "ready")
    for _ in range(2):
        paused = runtime.post("/pause", json=chosen).json()
        assert (paused["status"], paused["pod_status"]) == ("paused", "paused")
        assert (paused["session_api_key"], paused["url"], paused["work_hosts"]) == (None, None, {})
    for _ in range(2):
        assert runtime.post("/resume", json=chosen).json() == made, "its processes go on, and they know that key"
    gone = runtime.post("/stop", json=chosen).json()
    assert (gone["status"], gone["session_api_key"], gone["url"]) == ("stopped", None, None)
    for act in ("pause", "resume", "stop"):
        assert runtime.post(f"/{act}", json=chosen).status_code == 404
    assert runtime.get(f"/sessions/{made['session_id']}").status_code == 404
    anew = start(session_id=made["session_id"])
    assert anew["runtime_id"] != made["runtime_id"], "the id may be used again"


def test_batch_and_list(runtime: httpx.Client, start: Callable[..., dict[str, Any]]) -> None:
    first, second = start(), start()
    runtime.post("/pause", json={"runtime_id": first["runtime_id"]}).raise_for_status()
    ids = [second["session_id"], "no-such", first["session_id"]]
    found = runtime.get("/sessions/batch", params={"ids": ids}).json()
    assert [each and each["session_id"] for each in found] == [ids[0], None, ids[2]]
    assert [each and each["status"] for each in found] == ["running", None, "paused"]
    listed = runtime.get("/list").json()["runtimes"]
    assert [each["session_id"] for each in listed] == [second["session_id"]], "what is listed counts as running"
    assert runtime.get("/sessions/batch", params={"ids": ["x"] * 101}).status_code == 422


def test_the_urls_lead_inside_with_the_key_of_the_session(
    server: RunningServer, runtime: httpx.Client, start: Callable[..., dict[str, Any]]
) -> None:
    made = start(SERVES, working_dir="/workspace/project")
    url, key, id = made["url"], made["session_api_key"], made["runtime_id"]
    assert url == f"{server.url}/{id}"
    assert made["work_hosts"] == {f"{url}/work-1": 12000, f"{url}/work-2": 12001}
    assert ask(f"{url}/alive").status_code == 200, "OpenHands asks for this without a key"
    answer = ask(f"{url}/api/a%2Fb?c=d", key)
    said = {"port": 60000, "path": "/api/a%2Fb?c=d", "good": True, "mine": "yes", "folder": "/workspace/project"}
    assert answer.json() == said
    assert answer.headers["access-control-allow-origin"] == "*", "pages of OpenHands may read it"
    assert answer.headers["content-security-policy"].startswith("sandbox ")
    for name, port in {"vscode": 60001, "work-1": 12000, "work-2": 12001}.items():
        for path in ("", "/", "/x?tkn=1"):
            assert ask(f"{url}/{name}{path}", key).json() == {**said, "port": port, "path": path or "/"}
        host = f"{name}-60000-{id}.localhost"
        assert ask(f"{server.url}/y", key, Host=host).json() == {**said, "port": port, "path": "/y"}
    assert ask(f"{url}/vscodes", key).json()["port"] == 60000
    assert ask(f"{server.url}/", key, Host=f"60000-{id}.localhost").json()["port"] == 60000
    assert ask(server.url, key, Host=f"vscode-60001-{id}.localhost").status_code == 404
    assert ask(url).status_code == ask(url, "wrong").status_code == 401, "that is what listens inside"

    runtime.post("/pause", json={"runtime_id": id}).raise_for_status()
    assert ask(f"{url}/alive").status_code == 404, "while it is paused nobody gets in"
    runtime.post("/resume", json={"runtime_id": id}).raise_for_status()
    assert ask(f"{url}/api", key).json()["good"]


def test_the_key_of_a_session_is_none_of_the_servers(
    server: RunningServer, runtime: httpx.Client, start: Callable[..., dict[str, Any]], client: httpx.Client
) -> None:
    made = start(SERVES)
    with server.client("", **{"X-Session-API-Key": made["session_api_key"]}) as holder:
        assert holder.get(f"/sandboxes/{made['runtime_id']}").status_code == 401
    ours = client.get(f"/sandboxes/{made['runtime_id']}").json()["session_api_key"]
    assert ask(f"{made['url']}/api", ours).status_code == 401
    for url in (made["url"], f"{server.url}/api/v1/sandboxes/{made['runtime_id']}/ports/60000"):
        assert ask(f"{url}/alive", "theirs").json() == {"key": "theirs"}
        assert ask(f"{url}/alive", ours).json() == {"key": None}, "the server's own goes nowhere"


def test_the_image_may_be_a_spec_of_the_catalogue(
    runtime: httpx.Client, start: Callable[..., dict[str, Any]], client: httpx.Client
) -> None:
    client.delete("/sandbox-specs/agent")
    settings = {"work_dir": "/srv/agent", "env": {"MINE": "the spec's"}}
    spec = {"id": "agent", "settings": settings, "command": ["python3", "-c", ECHO]}
    client.post("/sandbox-specs", json=spec).raise_for_status()
    made = start({"image": "agent"}, working_dir="/workspace")
    said = ask(f"{made['url']}/api", made["session_api_key"]).json()
    assert (said["mine"], said["folder"], made["working_dir"]) == ("the spec's", "/srv/agent", "/srv/agent")
    refused = runtime.post("/start", json={"session_id": "x", "image": "agent", "resource_factor": 2})
    assert refused.status_code == 422


def test_another_sandbox_is_no_runtime(
    runtime: httpx.Client, start: Callable[..., dict[str, Any]], server: RunningServer, ann: Person
) -> None:
    made = start()
    with server.client(ann.key) as client:
        other = client.post("/sandboxes", json={}).json()["id"]
    assert runtime.get(f"/runtime/{other}").status_code == 404
    assert [each["runtime_id"] for each in runtime.get("/list").json()["runtimes"]] == [made["runtime_id"]]


def test_only_runtimes_have_urls_at_the_root(server: RunningServer, client: httpx.Client) -> None:
    other = client.post("/sandboxes").json()["id"]
    for path in (f"/{other}", f"/{other}/vscode", f"/{'0' * 24}/", "/0123456789"):
        assert httpx.get(f"{server.url}{path}", trust_env=False, verify=False).status_code == 404


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a GPU": ({"enable_gpu": True}, "GPU"),
    "sysbox": ({"runtime_class": "sysbox-runc"}, "runtime class"),
    "an unknown field": ({"gpus": 1}, "gpus"),
    "no factor": ({"resource_factor": 0}, "resource_factor"),
    "a strange session": ({"session_id": "../x"}, "session_id"),
    "a strange directory": ({"working_dir": "/proc"}, "work directory"),
    "a strange variable": ({"environment": {"a b": "c"}}, "environment"),
    "no image": ({"image": ""}, "image"),
    "an image that is not there": ({"image": "no-such:image"}, "no-such:image"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(runtime: httpx.Client, client: httpx.Client, what: str) -> None:
    more, reason = REFUSED[what]
    answer = runtime.post("/start", json={"session_id": "refused", **IDLES, **more})
    assert answer.status_code == 422, answer.text
    assert reason in answer.text
    assert not everything(client)


def test_a_session_that_cannot_be_started_says_why(runtime: httpx.Client, client: httpx.Client) -> None:
    wanted = {"session_id": "no-image", **IDLES, "image": "no-such:image"}
    assert runtime.post("/start", json=wanted).status_code == 422
    failed = runtime.get("/sessions/no-image").json()
    assert (failed["status"], failed["pod_status"]) == ("error", "failed")
    assert "no-such:image" in failed["reason"]
    assert runtime.get("/sessions/batch", params={"ids": "no-image"}).json() == [failed]
    assert not everything(client), "nothing is left"
    made = runtime.post("/start", json={**wanted, "image": "host"}).json()
    assert made["status"] == "running", "the next try counts"
    assert runtime.post("/stop", json={"runtime_id": made["runtime_id"]}).status_code == 200
    assert runtime.post("/start", json=wanted).status_code == 422
    assert runtime.post("/pause", json={"runtime_id": failed["runtime_id"]}).status_code == 404
    assert runtime.post("/stop", json={"runtime_id": failed["runtime_id"]}).json()["status"] == "stopped"
    assert runtime.get("/sessions/no-image").status_code == 404, "OpenHands stops what it deletes, also this"


@pytest.mark.parametrize("command", [["/no/such/program"], "echo sorry; exit 3"], ids=["missing", "ends"])
def test_a_session_whose_program_has_ended_is_an_error(
    runtime: httpx.Client, start: Callable[..., dict[str, Any]], command: object
) -> None:
    made = start(command=command)
    deadline = time.monotonic() + 30
    while (seen := runtime.get(f"/sessions/{made['session_id']}").json())["status"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (seen["status"], seen["url"], seen["session_api_key"]) == ("error", None, None)
    assert ("127" in seen["reason"]) if command == ["/no/such/program"] else ("3: sorry" in seen["reason"])


def test_who_may(server: RunningServer, admin: httpx.Client, start: Callable[..., dict[str, Any]]) -> None:
    made = start()
    for key in ("", "nonsense", "atoll_00_00"):
        with runtime_client(server, key) as nobody:
            assert nobody.get("/list").status_code == 401
    wanted = {"session_id": "x", **IDLES}
    reader = admin.post("/keys", json={"user_id": "ann", "scopes": ["read"]}).json()["key"]
    with runtime_client(server, reader) as reading:
        assert reading.post("/start", json=wanted).status_code == 403
        seen = reading.get(f"/sessions/{made['session_id']}").json()
        assert (seen["status"], seen["session_api_key"]) == ("running", None), "who may not use it gets no key to it"
    elsewhere = httpx.get(f"{server.url}/api/v1/info", headers={"X-API-Key": reader}, trust_env=False, verify=False)
    assert elsewhere.status_code == 401, "the header is known below /runtime alone"


def test_limits_are_those_of_any_sandbox(server: RunningServer, admin: httpx.Client) -> None:
    from server.conftest import new_user

    few = new_user(admin, "few-runtimes", max_sandboxes=1)
    with runtime_client(server, few.key) as theirs:
        made = theirs.post("/start", json={"session_id": "a", **IDLES}).json()
        assert theirs.post("/start", json={"session_id": "b", **IDLES}).status_code == 429
        assert theirs.get("/sessions/b").json()["status"] == "error"
        theirs.post("/stop", json={"runtime_id": made["runtime_id"]}).raise_for_status()


def test_a_label_cannot_make_a_sandbox_a_runtime(client: httpx.Client) -> None:
    refused = client.post("/sandboxes", json={"labels": {"runtime_session_id": "x"}})
    assert refused.status_code == 422
    assert "reserved" in json.dumps(refused.json())
