"""Starts a server, uses it as its administrator and as a user, prints what they know, kills it and is killed.

This runs with the code of an earlier commit (see `version_before.py`): no name in here follows a renaming.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

import atoll


def started(log: Path) -> tuple[subprocess.Popen[str], str, str]:
    """With its URL and the administrator's key."""
    command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", "serve", "--engine", "native", "--port", "0"]
    with log.open("a") as messages:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True, cwd="/")
    assert server.stdout is not None
    url = key = None
    while url is None or key is None:
        line = server.stdout.readline()
        if not line:
            raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")
        if match := re.search(r"listens on (http://\S+)", line):
            url = match[1]
        if match := re.match(r"\s+(atoll_\S+)$", line):
            key = match[1]
    return server, url, key


def client(url: str, key: str) -> httpx.Client:
    return httpx.Client(
        base_url=f"{url}/api/v1", headers={"Authorization": f"Bearer {key}"}, timeout=30, trust_env=False
    )


def ask(who: httpx.Client, method: str, path: str, **options: Any) -> Any:
    answer = who.request(method, path, **options)
    if not answer.is_success:
        raise SystemExit(f"{method} {path}: {answer.status_code} {answer.text}")
    return answer.json()


def use(url: str, admin_key: str, wanted: dict[str, Any]) -> dict[str, Any]:
    with client(url, admin_key) as admin:
        ask(admin, "POST", "/users", json={"id": "ann", "quotas": {"max_sandboxes": 7}})
        scopes = ["read", "use", "manage", "keys"]
        key = ask(admin, "POST", "/keys", json={"user_id": "ann", "name": "laptop", "scopes": scopes})["key"]
    with client(url, key) as ann:
        token = ask(ann, "POST", "/tokens", json={"lifetime_s": 3600})["token"]
        ask(ann, "POST", "/sandbox-specs", json=wanted["spec"])
        body = {"sandbox_spec_id": wanted["spec"]["id"], **wanted["sandbox"]}
        first = {"json": body, "headers": {"Idempotency-Key": "first"}}
        info = ask(ann, "POST", "/sandboxes", **first)
        path = f"/sandboxes/{info['id']}"
        ask(ann, "PUT", f"{path}/files/content", params={"path": "notes.txt"}, content=b"kept")
        ask(ann, "POST", f"{path}/shell", json={"command": "cd /tmp && colour=red"})
        command = ask(ann, "POST", f"{path}/commands", json={"command": f"echo ready; exec {wanted['program']}"})
        ask(ann, "POST", f"{path}/ports", json={"name": "WEB", "port": 8000})
        checkpoint = ask(ann, "POST", f"{path}/checkpoints", json={"name": "first"})
        ask(ann, "POST", f"{path}/snapshots", json={"name": "base", "checkpoint": "first"})
        fork = ask(ann, "POST", f"{path}/fork", json={"names": ["twin"]})[0]
        ask(ann, "POST", f"/sandboxes/{fork['id']}/pause")
        link = ask(ann, "POST", f"{path}/port-links", json={"port": 8000})["url"]
        return {
            "key": key,
            "token": token,
            "request": body,
            "sandbox": ask(ann, "GET", path),
            "fork": fork["id"],
            "command": command["id"],
            "checkpoint": checkpoint["id"],
            "link": httpx.URL(link).raw_path.decode(),
        }


def main(wanted: dict[str, Any]) -> None:
    server, url, key = started(Path(wanted["log"]))
    try:
        facts = use(url, key, wanted)
    finally:
        server.kill()
        server.wait()
    print(json.dumps({**facts, "admin": key, "code": atoll.__file__}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


main(json.loads(sys.argv[1]))
