"""Exposed ports by host name: an origin of its own that has no power over the API's, and WebSockets both ways."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from server.conftest import Person
from server.running import RunningServer
from server.test_ports import ECHO, serve

SOCKETS = """
import base64, hashlib, json, socket, struct, threading
def exactly(c, n):
    data = b""
    while len(data) < n:
        piece = c.recv(n - len(data))
        if not piece: raise OSError
        data += piece
    return data
def frame(c, opcode, data, fin=0x80):
    n = len(data)
    head = bytes([fin | opcode]) + (bytes([n]) if n < 126 else b"\\x7e" + struct.pack("!H", n) if n < 65536
                                    else b"\\x7f" + struct.pack("!Q", n))
    c.sendall(head + data)
def talk(c):
    head = b""
    while b"\\r\\n\\r\\n" not in head: head += c.recv(4096)
    lines = head.decode().split("\\r\\n")
    fields = {n.lower(): v.strip() for n, _, v in (l.partition(":") for l in lines[1:])}
    path = lines[0].split(" ")[1]
    if path == "/no":
        c.sendall(b"HTTP/1.1 418 Teapot\\r\\nContent-Length: 0\\r\\n\\r\\n")
        return
    mark = (fields["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()
    accept = base64.b64encode(hashlib.sha1(mark).digest()).decode()
    chosen = "Sec-WebSocket-Protocol: chat\\r\\n" if "chat" in fields.get("sec-websocket-protocol", "") else ""
    if path == "/wrong": accept = "nonsense"
    c.sendall(("HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
               "Sec-WebSocket-Accept: %s\\r\\n%s\\r\\n" % (accept, chosen)).encode())
    frame(c, 1, json.dumps({"path": path, "headers": fields}).encode())
    if path == "/huge":
        for _ in range(200): frame(c, 0 if _ else 2, b"x" * 65536, 0)
    if path == "/junk": c.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n" * 100)
    if path == "/bad-text": frame(c, 1, b"\\xff\\xfe")
    if path == "/pieces":
        frame(c, 1, b"one ", 0); frame(c, 9, b"ping"); frame(c, 0, b"two")
    if path == "/end": frame(c, 8, struct.pack("!H", 4321) + b"enough")
    while True:
        first, second = exactly(c, 2)
        n = second & 127
        if n == 126: (n,) = struct.unpack("!H", exactly(c, 2))
        elif n == 127: (n,) = struct.unpack("!Q", exactly(c, 8))
        key, data = exactly(c, 4), exactly(c, n)
        data = bytes(b ^ key[i % 4] for i, b in enumerate(data))
        if first & 15 == 8:
            open("closed", "wb").write(data)
            frame(c, 8, data)
            return
        if first & 15 in (1, 2): frame(c, first & 15, data[::-1])
def carry(c):
    try:
        with c: talk(c)
    except OSError: pass
s = socket.create_server(("127.0.0.1", 8000))
while True: threading.Thread(target=carry, args=(s.accept()[0],), daemon=True).start()
"""


def expose(client: httpx.Client, *, public: bool = False) -> dict[str, Any]:
    name = "public-web" if public else "web"
    client.delete(f"/sandbox-specs/{name}")
    ports = [{"name": "web", "port": 8000, "public": public}, {"name": "other", "port": 8001}]
    client.post("/sandbox-specs", json={"id": name, "exposed_ports": ports}).raise_for_status()
    info: dict[str, Any] = client.post("/sandboxes", json={"sandbox_spec_id": name}).json()
    return info


@pytest.fixture
def info(client: httpx.Client) -> dict[str, Any]:
    return expose(client)


def host_of(info: dict[str, Any], port: int = 8000) -> str:
    (url,) = [each["host_url"] for each in info["exposed_urls"] if each["port"] == port]
    return str(urlsplit(url).netloc)


@contextlib.contextmanager
def browser(server: RunningServer, host: str, **headers: str) -> Iterator[httpx.Client]:
    """As one that looked up the host name, and keeps the cookies of that host alone."""
    with httpx.Client(base_url=server.url, headers={"Host": host, **headers}, timeout=30, trust_env=False) as made:
        yield made


def entered(client: httpx.Client, info: dict[str, Any], browser: httpx.Client, rest: str = "") -> httpx.Response:
    """By a link; the cookie that it left is sent from now on."""
    made = client.post(f"/sandboxes/{info['id']}/port-links", json={"port": 8000, "lifetime_s": 600}).json()
    answer = browser.get(urlsplit(made["host_url"]).path + rest)
    browser.cookies.clear()
    if "set-cookie" in answer.headers:
        browser.headers["Cookie"] = answer.headers["set-cookie"].partition(";")[0]
    return answer


@pytest.mark.parametrize("public", [False, True])
def test_large_bodies_go_in_by_host_name(client: httpx.Client, server: RunningServer, public: bool) -> None:
    info = expose(client, public=public)
    serve(client, f"/sandboxes/{info['id']}", ECHO)
    with browser(server, host_of(info)) as page:
        if not public:
            entered(client, info, page)
        said = page.post("/upload", content=bytes(300_000))
        assert (said.status_code, said.json()["body"]) == (200, 300_000), said.text


def test_a_link_opens_a_host_of_its_own(client: httpx.Client, server: RunningServer, info: dict[str, Any]) -> None:
    assert re.fullmatch(rf"8000-{info['id']}\.localhost:\d+", host_of(info))
    with browser(server, host_of(info)) as page:
        private = page.get("/", headers={"Accept": "text/html"})
        assert private.status_code == 401
        assert "private" in private.text
        went = entered(client, info, page, "/a%2Fb/c?d=e")
        assert (went.status_code, went.headers["location"]) == (303, "/a%2Fb/c?d=e")
        cookie = went.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=lax" in cookie
        assert "domain" not in cookie, "it is this host's alone"
        closed = page.get("/", headers={"Accept": "text/html"})
        assert closed.status_code == 502
        assert "nothing listens on port 8000" in closed.text
        assert "text/html" in closed.headers["content-type"]
        serve(client, f"/sandboxes/{info['id']}", ECHO)
        said = page.get("/a%2Fb?c", headers={"Authorization": "Basic abc", "X-Forwarded-Host": "evil.test"})
        assert said.status_code == 200, "what opens later works at once"
        names = {name.lower(): value for name, value in said.json()["headers"].items()}
        assert said.json()["path"] == "/a%2Fb?c"
        assert names["host"] == names["x-forwarded-host"] == host_of(info)
        assert "atoll_port" not in names.get("cookie", "")
        assert names["authorization"] == "Basic abc", "what is not ours is for what listens inside"
        assert said.headers["set-cookie"] == "a=b", "its cookies are this host's alone"
        assert "x-accel-redirect" not in said.headers


def test_only_whoever_may_gets_in(
    client: httpx.Client, server: RunningServer, info: dict[str, Any], ann: Person, bob: Person
) -> None:
    serve(client, f"/sandboxes/{info['id']}", ECHO)
    with browser(server, host_of(info)) as page:
        assert page.get("/").status_code == 401
        for mark in ("", "1.x", f"9999999999.{'0' * 64}"):
            assert page.get("/", headers={"Cookie": f"atoll_port={mark}"}).status_code == 401
            assert page.get(f"/.atoll/~{mark}/").status_code in (401, 404)
        mine = page.get("/", headers={"Authorization": f"Bearer {ann.key}"})
        assert mine.status_code == 200
        assert ann.key not in mine.text, "the credential does not go inside"
        assert page.get("/", headers={"X-Session-API-Key": info["session_api_key"]}).status_code == 200
        assert page.get("/", headers={"Authorization": f"Bearer {bob.key}"}).status_code == 404
        assert page.get(f"/?token={ann.key}").status_code == 401
        entered(client, info, page)
        assert page.get("/").status_code == 200
        kept = page.headers["Cookie"]
        assert ann.key not in page.get("/", headers={"Authorization": f"Bearer {ann.key}"}).text
    with browser(server, host_of(info, 8001), Cookie=kept) as page:
        assert page.get("/").status_code == 401, "a link is good for one port"
    other = expose(client)
    with browser(server, host_of(other), Cookie=kept) as page:
        assert page.get("/").status_code == 401, "and for one sandbox"
    with browser(server, host_of(info).replace("8000-", "22-"), Authorization=f"Bearer {ann.key}") as page:
        assert page.get("/").status_code == 403
    with browser(server, host_of(info), Cookie=kept) as page:
        client.delete(f"/sandboxes/{info['id']}").raise_for_status()
        assert page.get("/").status_code == 401, "it ends with the sandbox"


def test_the_api_is_not_on_such_a_host_and_knows_none_of_its_cookies(
    client: httpx.Client, server: RunningServer, info: dict[str, Any], ann: Person
) -> None:
    port = urlsplit(server.url).port
    hosts = [host_of(info), f"8000-{info['id']}.localhost.", f"8000-{info['id'].upper()}.LOCALHOST:{port}"]
    for host in (*hosts, f"evil.localhost:{port}", f"0-{info['id']}.localhost", f"99999-{info['id']}.localhost"):
        with browser(server, host) as page:
            for path in ("/api/v1/health", "/api/v1/sandboxes/search", "/api/v1/openapi.json"):
                found = page.get(path, headers={"Authorization": f"Bearer {ann.key}"})
                assert found.status_code in (404, 502), (host, path, found.text)
                assert "items" not in found.text
    with browser(server, host_of(info)) as page:
        entered(client, info, page)
        cookie = page.headers["Cookie"]
    with browser(server, f"127.0.0.1:{port}", Cookie=cookie, Origin=f"http://{host_of(info)}") as page:
        answer = page.get(f"/api/v1/sandboxes/{info['id']}")
        assert answer.status_code == 401, "a cookie is nothing to the API"
        assert "access-control-allow-origin" not in answer.headers
        preflight = page.options("/api/v1/sandboxes", headers={"Access-Control-Request-Method": "POST"})
        assert "access-control-allow-origin" not in preflight.headers
    with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
        hosts_twice = f"Host: 127.0.0.1:{port}\r\nHost: {host_of(info)}\r\nConnection: close\r\n\r\n"
        raw.sendall(f"GET /api/v1/health HTTP/1.1\r\n{hosts_twice}".encode())
        assert raw.recv(100).startswith((b"HTTP/1.1 404", b"HTTP/1.1 400"))


def test_a_link_leads_nowhere_else(client: httpx.Client, server: RunningServer, info: dict[str, Any]) -> None:
    with browser(server, host_of(info)) as page:
        for rest in ("/evil.test/", "/%5C/evil.test", "\\evil.test"):
            found = entered(client, info, page, rest)
            assert found.headers["location"].startswith("/"), rest
            assert not found.headers["location"].startswith(("//", "/\\")), rest


def test_pages_of_other_origins_cannot_use_the_cookie(
    client: httpx.Client, server: RunningServer, info: dict[str, Any]
) -> None:
    serve(client, f"/sandboxes/{info['id']}", ECHO)
    with browser(server, host_of(info)) as page:
        entered(client, info, page)
        own = f"http://{host_of(info)}"
        assert page.post("/", content=b"x", headers={"Origin": own}).status_code == 200
        for origin in ("http://evil.test", "null", f"{own}.evil.test", f"http://8001-{info['id']}.localhost"):
            assert page.post("/", content=b"x", headers={"Origin": origin}).status_code == 403, origin


def test_a_public_port_needs_no_credential(client: httpx.Client, server: RunningServer, ann: Person) -> None:
    info = expose(client, public=True)
    assert [each["public"] for each in info["exposed_urls"]] == [True, False]
    serve(client, f"/sandboxes/{info['id']}", ECHO)
    with browser(server, host_of(info)) as page:
        assert page.get("/").status_code == 200
        assert ann.key not in page.get("/", headers={"Authorization": f"Bearer {ann.key}"}).text
        assert page.get(f"/api/v1/sandboxes/{info['id']}/ports/8000/", headers={"Host": "localhost"}).status_code == 200
        other = page.get(f"/api/v1/sandboxes/{info['id']}/ports/8001/", headers={"Host": "localhost"})
        assert other.status_code == 401
        assert page.get(f"/api/v1/sandboxes/{info['id']}", headers={"Host": "localhost"}).status_code == 401
    with browser(server, host_of(info, 8001)) as page:
        assert page.get("/").status_code == 401
    client.delete(f"/sandboxes/{info['id']}").raise_for_status()
    with browser(server, host_of(info)) as page:
        assert page.get("/").status_code == 401


# --- WebSockets ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def line(server: RunningServer, host: str, path: str, **options: Any) -> Iterator[ClientConnection]:
    where = urlsplit(server.url)
    sock = socket.create_connection((where.hostname, where.port), timeout=30)
    with connect(f"ws://{host}{path}", sock=sock, proxy=None, compression=None, **options) as made:
        yield made


@pytest.fixture
def talking(client: httpx.Client, server: RunningServer, info: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A sandbox where WebSockets are answered, and the headers of a browser that came by a link."""
    path = f"/sandboxes/{info['id']}"
    client.put(f"{path}/files/content", params={"path": "server.py"}, content=SOCKETS).raise_for_status()
    client.post(f"{path}/commands", json={"command": ["python3", "server.py"]}).raise_for_status()
    with browser(server, host_of(info)) as page:
        entered(client, info, page)
        while page.get("/no").status_code != 418:
            time.sleep(0.02)
        return info, {"Cookie": page.headers["Cookie"], "Origin": f"http://{host_of(info)}"}


def test_websockets_pass_both_ways(
    client: httpx.Client, server: RunningServer, talking: tuple[dict[str, Any], dict[str, str]], ann: Person
) -> None:
    info, headers = talking
    with line(server, host_of(info), "/a%2Fb?c=d", additional_headers=headers, subprotocols=["x", "chat"]) as made:
        said = json.loads(made.recv(timeout=20))
        assert said["path"] == "/a%2Fb?c=d"
        assert "cookie" not in said["headers"]
        assert made.subprotocol == "chat"
        made.send("hello")
        assert made.recv(timeout=20) == "olleh"
        made.send(b"\0\1" * 100_000)
        assert made.recv(timeout=20) == b"\1\0" * 100_000
        made.close(4001, "bye")
    wait = "until test -s closed; do sleep 0.02; done; cat closed"
    ended = client.post(f"/sandboxes/{info['id']}/exec", json={"command": wait, "timeout_s": 20}).json()
    assert ended["stdout"].endswith("bye"), "the end and its reason go inside"
    address = f"/api/v1/sandboxes/{info['id']}/ports/8000/by/path"
    where = urlsplit(server.url).netloc
    with line(server, where, address, subprotocols=[f"atoll.bearer.{ann.key}"]) as made:
        said = json.loads(made.recv(timeout=20))
        assert said["path"] == "/by/path"
        assert ann.key not in json.dumps(said)
    link = client.post(f"/sandboxes/{info['id']}/port-links", json={"port": 8000}).json()["url"]
    with line(server, where, urlsplit(link).path + "linked", origin="null") as made:
        assert json.loads(made.recv(timeout=20))["path"] == "/linked"


def test_what_comes_out_of_a_websocket_is_bounded_and_well_formed(
    server: RunningServer, talking: tuple[dict[str, Any], dict[str, str]]
) -> None:
    info, headers = talking
    expected = {"/huge": 1009, "/junk": 1002, "/bad-text": 1007, "/end": 4321}
    for path, code in expected.items():
        with line(server, host_of(info), path, additional_headers=headers) as made:
            made.recv(timeout=20)
            with pytest.raises(ConnectionClosed) as ended:
                made.recv(timeout=20)
        assert ended.value.rcvd is not None
        assert ended.value.rcvd.code == code, path
    with line(server, host_of(info), "/pieces", additional_headers=headers) as made:
        made.recv(timeout=20)
        assert made.recv(timeout=20) == "one two"
    for path, status in {"/no": 418, "/wrong": 502}.items():
        with pytest.raises(InvalidStatus) as refused, line(server, host_of(info), path, additional_headers=headers):
            pass
        assert refused.value.response.status_code == status


def test_a_websocket_ends_with_its_sandbox(
    client: httpx.Client, server: RunningServer, talking: tuple[dict[str, Any], dict[str, str]]
) -> None:
    info, headers = talking
    with line(server, host_of(info), "/", additional_headers=headers) as made:
        made.recv(timeout=20)
        client.delete(f"/sandboxes/{info['id']}").raise_for_status()
        with pytest.raises(ConnectionClosed):
            made.recv(timeout=20)


def test_a_websocket_ends_with_its_link(
    client: httpx.Client, server: RunningServer, talking: tuple[dict[str, Any], dict[str, str]]
) -> None:
    info, _ = talking
    link = client.post(f"/sandboxes/{info['id']}/port-links", json={"port": 8000, "lifetime_s": 6}).json()["url"]
    with line(server, urlsplit(server.url).netloc, urlsplit(link).path) as made:
        made.recv(timeout=20)
        with pytest.raises(ConnectionClosed) as ended:
            made.recv(timeout=40)
    assert ended.value.rcvd is not None
    assert ended.value.rcvd.reason == "the link has expired"


def test_pages_of_other_sites_open_no_websocket(
    server: RunningServer, talking: tuple[dict[str, Any], dict[str, str]], ann: Person
) -> None:
    """Neither to a port, nor to the terminal or the agent of a sandbox, whatever credential they have got hold of."""
    info, headers = talking
    where, path = urlsplit(server.url).netloc, f"/api/v1/sandboxes/{info['id']}"
    key = {"Authorization": f"Bearer {ann.key}"}
    evil = ("http://evil.test", "null", f"http://{host_of(info)}")
    tries = [(host_of(info), "/", {**headers, "Origin": origin}, 403) for origin in evil[:2]]
    tries += [(host_of(info), "/", {"Origin": headers["Origin"]}, 401)]
    for kind in ("terminal", "agent", "ports/8000/"):
        tries += [(where, f"{path}/{kind}", {**key, "Origin": origin}, 403) for origin in evil]
        tries += [(where, f"{path}/{kind}?token={ann.key}", {}, 401)]
        tries += [(where, f"{path}/{kind}", {"Cookie": headers["Cookie"]}, 401)]
    for host, target, sent, status in tries:
        with pytest.raises(InvalidStatus) as refused, line(server, host, target, additional_headers=sent):
            pass
        assert refused.value.response.status_code == status, (host, target, sent)
    with line(server, where, f"{path}/terminal", additional_headers={**key, "Origin": server.url}):
        pass
    with line(server, host_of(info), "/", additional_headers=headers):
        pass
