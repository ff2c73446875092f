"""Something that listens in a sandbox, reached over HTTP."""

from __future__ import annotations

import httpx
import pytest

PROGRAM = """
import http.server, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = json.dumps({"path": self.path, "headers": dict(self.headers), "body": body.decode()}).encode()
        self.send_response(207)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("Set-Cookie", "evil=1")
        self.send_header("X-Own", "yes")
        self.end_headers()
        self.wfile.write(answer)
    do_GET = do_POST
http.server.HTTPServer(("127.0.0.1", 8011), Handler).serve_forever()
"""


@pytest.fixture
def listening(client: httpx.Client, sandbox: str) -> str:
    client.put(f"{sandbox}/files/content", params={"path": "s.py"}, content=PROGRAM.encode())
    assert client.post(f"{sandbox}/commands", json={"command": ["python3", "s.py"]}).status_code == 201
    probe = "until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8011))'; do sleep 0.1; done"
    assert client.post(f"{sandbox}/exec", json={"command": probe, "timeout_s": 30}).json()["success"]
    return f"{sandbox}/ports/8011"


def test_a_request_is_handed_on_without_credentials(client: httpx.Client, others: httpx.Client, listening: str) -> None:
    answer = client.post(f"{listening}/a/b?c=d", content=b"hello", headers={"X-Mine": "1", "Cookie": "secret=1"})
    assert answer.status_code == 207
    seen = answer.json()
    assert (seen["path"], seen["body"], seen["headers"]["x-mine"]) == ("/a/b?c=d", "hello", "1")
    assert {"authorization", "cookie"} & {name.lower() for name in seen["headers"]} == set()
    assert answer.headers["x-own"] == "yes"
    assert "set-cookie" not in answer.headers
    assert answer.headers["content-security-policy"].startswith("sandbox")
    assert client.get(f"{listening}/").status_code == 207
    assert others.get(f"{listening}/").status_code == 404


def test_a_port_where_nothing_listens_is_a_conflict(client: httpx.Client, sandbox: str) -> None:
    refused = client.get(f"{sandbox}/ports/9/")
    assert (refused.status_code, refused.json()["code"]) == (409, "connection_refused")
    assert client.get(f"{sandbox}/ports/70000/").status_code == 422
