"""A server that was killed before an upgrade: its users, keys and sandboxes are there, and everything works on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx

from atoll.settings import Settings
from server.running import RunningServer, everything, running_server
from upgrade.conftest import Installation
from upgrade.version_before import OldTree

SPEC = {"id": "tools", "settings": {"env": {"COLOUR": "coral"}, "limits": {"memory_bytes": 256 << 20}}}
SANDBOX = {"name": "builder", "labels": {"team": "red"}, "lifetime_s": 3600, "task_id": "task-7"}
PROGRAM = "python3 -m http.server 8000 -b 127.0.0.1 -d /workspace"


def test_a_server_goes_on_with_what_the_version_before_had(
    old: OldTree, installation: Installation, need_engine: Callable[[str, Settings], None]
) -> None:
    need_engine("native", installation.settings)
    folder = installation.folder
    wanted = {"spec": SPEC, "sandbox": SANDBOX, "program": PROGRAM, "log": str(folder / "log")}
    state = {"ATOLL_STATE_DIR": str(folder / "state")}
    facts = old.run("served.py", wanted, {**installation.environment, **state})
    old.remove()
    (folder / "key").write_text(facts["admin"])
    with running_server(folder, "native") as server:
        assert server.key == facts["admin"], "it made no new one"
        with server.client() as admin, server.client(facts["key"]) as ann, server.client(facts["token"]) as token:
            assert [user["quotas"]["max_sandboxes"] for user in users(admin) if user["id"] == "ann"] == [7]
            assert {info["id"] for info in everything(token)} == {facts["sandbox"]["id"], facts["fork"]}
            is_as_it_was(ann, facts)
            goes_on(server, ann, facts)
            assert ann.delete(f"/sandboxes/{facts['fork']}").is_success
            assert ann.delete("/snapshots/base").is_success


def users(admin: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = admin.get("/users").json()["items"]
    return found


def is_as_it_was(ann: httpx.Client, facts: dict[str, Any]) -> None:
    before = facts["sandbox"]
    now = ann.get(f"/sandboxes/{before['id']}").json()
    for name in ("name", "labels", "created_by_user_id", "sandbox_spec_id", "expires_at", "limits", "exposed_urls"):
        if name == "limits":
            now[name] = {limit: now[name][limit] for limit in before[name]}  # there are more of them now
        assert without_port(now[name]) == without_port(before[name]), name
    assert now["session_api_key"] == before["session_api_key"]
    assert now["status"] == "RUNNING"
    again = ann.post("/sandboxes", json=facts["request"], headers={"Idempotency-Key": "first"})
    assert again.json()["id"] == before["id"], "the same request with the same key"
    assert ann.get("/sandbox-specs/tools").json()["initial_env"] == SPEC["settings"]["env"]  # type: ignore[index]
    assert [key["name"] for key in ann.get("/keys").json()["items"]] == ["laptop"]
    assert [each["name"] for each in ann.get("/snapshots").json()["items"]] == ["base"]
    assert ann.get(f"/sandboxes/{facts['fork']}").json()["status"] == "PAUSED"


def without_port(value: Any) -> Any:
    """The server listens on another port now, which is part of its URLs."""
    return json.loads(re.sub(r"(localhost|127\.0\.0\.1):[0-9]+", r"\1", json.dumps(value)))


def goes_on(server: RunningServer, ann: httpx.Client, facts: dict[str, Any]) -> None:
    sandbox = f"/sandboxes/{facts['sandbox']['id']}"
    assert ann.get(f"{sandbox}/files/content", params={"path": "notes.txt"}).content == b"kept"
    assert ann.post(f"{sandbox}/exec", json={"command": "echo $COLOUR"}).json()["stdout"] == "coral\n"
    shell = ann.post(f"{sandbox}/shell", json={"command": "pwd; echo $colour"}).json()
    assert shell["stdout"] == "/tmp\nred\n", "it is the same shell"
    session = {"X-Session-API-Key": facts["sandbox"]["session_api_key"]}
    with httpx.Client(base_url=server.url, headers=session, trust_env=False, timeout=30) as holder:
        found = holder.get("/api/v1/sandboxes/by-session-key").json()
        assert found["id"] == facts["sandbox"]["id"]
    assert httpx.get(f"{server.url}{facts['link']}notes.txt", trust_env=False).text == "kept", "the link leads there"
    assert ann.post(f"{sandbox}/commands/{facts['command']}/kill", json={"signal": 9}).is_success
    assert ann.get(f"{sandbox}/commands/{facts['command']}/result").json()["stdout"].startswith("ready\n")
    ann.put(f"{sandbox}/files/content", params={"path": "notes.txt"}, content=b"changed")
    assert ann.post(f"{sandbox}/checkpoints/{facts['checkpoint']}/rollback").is_success
    assert ann.get(f"{sandbox}/files/content", params={"path": "notes.txt"}).content == b"kept"
    copy = ann.post("/sandboxes", json={"settings": {"image": "snapshot:base"}}).json()["id"]
    assert ann.get(f"/sandboxes/{copy}/files/content", params={"path": "notes.txt"}).content == b"kept"
    assert ann.post(f"/sandboxes/{facts['fork']}/resume").is_success
    content = ann.get(f"/sandboxes/{facts['fork']}/files/content", params={"path": "notes.txt"}).content
    assert content == b"kept"
