"""Exposed ports through the server: what comes out is hostile, and the caller's credential is not to go in."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from server.conftest import Person
from server.running import RunningServer, running_server

ECHO = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        said = json.dumps({"path": self.path, "method": self.command, "body": len(body), "headers": dict(self.headers)})
        self.send_response(200)
        for name, value in {"Set-Cookie": "a=b; Domain=localhost", "X-Accel-Redirect": "/etc/passwd",
                            "Access-Control-Allow-Origin": "*", "Service-Worker-Allowed": "/"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said.encode())
    do_GET = do_POST = do_PUT = answer
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


@pytest.fixture
def exposed(client: httpx.Client) -> str:
    """The path of a sandbox whose spec exposes port 8000."""
    client.delete("/sandbox-specs/web")
    ports = [{"name": "web", "port": 8000}]
    made = client.post("/sandbox-specs", json={"id": "web", "exposed_ports": ports})
    assert made.status_code < 300, made.text
    started = client.post("/sandboxes", json={"sandbox_spec_id": "web"})
    assert started.status_code == 201, started.text
    path = f"/sandboxes/{started.json()['id']}"
    assert [each["port"] for each in started.json()["exposed_urls"]] == [8000]
    return path


def serve(client: httpx.Client, path: str, program: str) -> None:
    client.put(f"{path}/files/content", params={"path": "server.py"}, content=program).raise_for_status()
    client.post(f"{path}/commands", json={"command": ["python3", "server.py"]}).raise_for_status()
    look = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000))' 2>/dev/null"
    wait = f"until {look}; do sleep 0.05; done"
    assert client.post(f"{path}/exec", json={"command": wait, "timeout_s": 30}).json()["success"]


def test_requests_go_in_and_answers_come_out(client: httpx.Client, exposed: str) -> None:
    closed = client.get(f"{exposed}/ports/8000/")
    assert closed.status_code == 502
    assert "nothing listens on port 8000" in closed.text
    serve(client, exposed, ECHO)
    answer = client.get(f"{exposed}/ports/8000/a%2Fb/c?d=e%20f", headers={"Cookie": "session=1", "X-Mine": "yes"})
    said = answer.json()
    assert said["path"] == "/a%2Fb/c?d=e%20f"
    names = {name.lower(): value for name, value in said["headers"].items()}
    assert names["x-mine"] == "yes"
    assert names["host"] == "localhost:8000"
    assert not {"authorization", "cookie", "x-session-api-key"} & names.keys(), "no credential goes inside"
    assert client.post(f"{exposed}/ports/8000/up", content=b"x" * 300_000).json()["body"] == 300_000


def test_a_page_from_inside_has_no_power_over_the_server(client: httpx.Client, exposed: str) -> None:
    serve(client, exposed, ECHO)
    answer = client.get(f"{exposed}/ports/8000/")
    assert answer.headers["content-security-policy"].startswith("sandbox ")
    assert "allow-same-origin" not in answer.headers["content-security-policy"]
    refused = {"set-cookie", "x-accel-redirect", "access-control-allow-origin", "service-worker-allowed"}
    assert not refused & {name.lower() for name in answer.headers}
    redirect = client.get(f"{exposed}/ports/8000/redirect", follow_redirects=False)
    assert redirect.status_code == 302, "it is passed on, never followed"


def test_only_exposed_ports_and_only_for_their_owner(
    client: httpx.Client, others: httpx.Client, server: RunningServer, exposed: str, ann: Person
) -> None:
    serve(client, exposed, ECHO)
    for port in (22, 80, 8001, 65535):
        assert client.get(f"{exposed}/ports/{port}/").status_code == 403
    assert client.get(f"{exposed}/ports/0/").status_code == 422
    assert others.get(f"{exposed}/ports/8000/").status_code == 404
    with httpx.Client(base_url=f"{server.url}/api/v1") as nobody:
        assert nobody.get(f"{exposed}/ports/8000/").status_code == 401
    assert client.get(f"{exposed}/ports/8000/").status_code == 200, "the control"


HOSTILE = {
    "no HTTP": b"SSH-2.0-x\r\n",
    "both lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
    "endless headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200_000,
    "switching": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nGET /api/v1/keys HTTP/1.1\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_answers_are_refused(client: httpx.Client, exposed: str, kind: str) -> None:
    program = (
        "import socket\ns = socket.create_server(('127.0.0.1', 8000))\nwhile 1:\n  c = s.accept()[0]\n"
        f"  try:\n    c.recv(1); c.sendall(eval({json.dumps(repr(HOSTILE[kind][:2000]))})"
        f" * {max(1, len(HOSTILE[kind]) // 2000)}); c.close()\n  except OSError: pass\n"
    )
    serve(client, exposed, program)
    assert client.get(f"{exposed}/ports/8000/").status_code == 502


def test_a_deleted_sandboxs_port_is_gone(client: httpx.Client, exposed: str) -> None:
    serve(client, exposed, ECHO)
    client.delete(exposed).raise_for_status()
    assert client.get(f"{exposed}/ports/8000/").status_code in (404, 410)


def test_only_administrators_open_private_ranges(client: httpx.Client, admin: httpx.Client) -> None:
    settings = {"network": {"allowed_cidrs": ["10.0.0.0/8"]}}
    assert client.post("/sandboxes", json={"settings": settings}).status_code == 403
    assert client.post("/sandboxes", json={"settings": {"network": {"unknown": 1}}}).status_code == 422
    refused = client.post("/sandboxes", json={"settings": {"network": "all"}})
    assert refused.status_code >= 400, "this engine cannot enforce it"
    assert "network" in refused.text


def test_a_link_is_good_for_one_port_until_it_expires(
    client: httpx.Client, others: httpx.Client, server: RunningServer, exposed: str
) -> None:
    serve(client, exposed, ECHO)
    made = client.post(f"{exposed}/port-links", json={"port": 8000, "lifetime_s": 600}).json()
    path = made["url"][made["url"].index("/api/v1") :]
    short = client.post(f"{exposed}/port-links", json={"port": 8000, "lifetime_s": 1}).json()["url"]
    expired = short[short.index("/api/v1") :]
    assert client.post(f"{exposed}/port-links", json={"port": 22}).status_code == 403
    assert others.post(f"{exposed}/port-links", json={"port": 8000}).status_code == 404
    with httpx.Client(base_url=server.url) as browser:
        assert browser.get(f"{path}page?x=1").json()["path"] == "/page?x=1"
        mark = path.rstrip("/").rpartition("~")[2]
        until, _, signature = mark.partition(".")
        wrong = [
            f"{int(until) + 1}.{signature}",
            f"{until}.{signature[::-1]}",
            until,
            f"{until}.",
            "9" * 30,
            f"-1.{signature}",
        ]
        for other in wrong:
            assert browser.get(path.replace(mark, other)).status_code == 401, other
        assert browser.get(path.replace("/8000/", "/8001/")).status_code == 401
        while (answer := browser.get(expired)).status_code == 200:
            pass
        assert answer.status_code == 401
        client.delete(exposed).raise_for_status()
        assert browser.get(path).status_code == 401


SILENT = """
import socket
s = socket.create_server(("127.0.0.1", 8000))
held = []
while True: held.append(s.accept())
"""


@pytest.mark.parametrize("way", ["link", "public", "host"])
def test_requests_to_ports_are_bounded_whoever_sends_them(session_folder: Path, way: str) -> None:
    with running_server(session_folder / f"few-{way}", ATOLL_MAX_REQUESTS="1") as server, server.client() as client:
        port = {"name": "web", "port": 8000, "public": way != "link"}
        client.post("/sandbox-specs", json={"id": "few", "exposed_ports": [port]}).raise_for_status()
        info = client.post("/sandboxes", json={"sandbox_spec_id": "few"}).json()
        serve(client, f"/sandboxes/{info['id']}", SILENT)
        (url,) = info["exposed_urls"]
        if way == "link":
            url = client.post(f"/sandboxes/{info['id']}/port-links", json={"port": 8000}).json()
        target = urlsplit(url["url"]).path if way != "host" else "/"
        host = urlsplit(url["host_url"]).netloc if way == "host" else "localhost"
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname or "", address.port or 0), 30) as first:
            first.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            # Whichever the server takes up first is served, and the other one is refused.
            answers = [_asked(server.url + target, host), _asked(server.url + target, host)]
            assert 429 in answers or b" 429 " in first.recv(99, socket.MSG_DONTWAIT), "any number of them is taken"
        while client.get("/sandboxes/search").status_code == 429:  # until the first one is noticed to be gone
            time.sleep(0.05)


def _asked(url: str, host: str) -> int | None:
    try:
        return httpx.get(url, headers={"Host": host}, timeout=1, trust_env=False).status_code
    except httpx.ReadTimeout:
        return None
