"""Waiting for what a server will say, and for what listens in its sandboxes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

WEB = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = json.dumps({"path": self.path, "headers": dict(self.headers)}).encode()
        self.send_response(int(os.environ.get("STATUS", "200")))
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def until(ask: Callable[[], T], seconds: float = 30.0) -> T:
    """The first answer that is true."""
    deadline = time.monotonic() + seconds
    while not (found := ask()):
        assert time.monotonic() < deadline, f"it did not come to that: {found!r}"
        time.sleep(0.03)
    return found


def start(client: httpx.Client, **wanted: Any) -> dict[str, Any]:
    answer = client.post("/sandboxes", json=wanted)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def run(client: httpx.Client, sandbox_id: str, command: str) -> str:
    answer = client.post(f"/sandboxes/{sandbox_id}/exec", json={"command": command, "timeout_s": 30})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["stdout"])


def launch(client: httpx.Client, sandbox_id: str, program: str, *arguments: str) -> None:
    """A Python program in the background."""
    path = f"/sandboxes/{sandbox_id}"
    client.put(f"{path}/files/content", params={"path": "program.py"}, content=program).raise_for_status()
    client.post(f"{path}/commands", json={"command": ["python3", "program.py", *arguments]}).raise_for_status()


def events(client: httpx.Client, sandbox_id: str, kind: str) -> list[dict[str, Any]]:
    """All of this kind, page by page."""
    found: list[dict[str, Any]] = []
    query: dict[str, str | int] = {"sandbox_id": sandbox_id, "kind": kind, "limit": 1000}
    after = 0
    while True:
        page = client.get("/events", params={**query, "after": after}).json()
        if not page["items"]:
            return found
        assert {event["kind"] for event in page["items"]} == {kind}
        found += page["items"]
        after = page["next_after"]
