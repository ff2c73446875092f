"""Policies through a server: set when a sandbox is made, changed and shown over the API, the same after a restart."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import httpx

from atoll.settings import Settings
from network import world
from network.attacks import PRELUDE
from network.conftest import remove_all
from network.internet import Internet
from server.running import running_server

POLICY = {"allowed_domains": ["allowed.test"]}


def looked(client: httpx.Client, sandbox: str, host: str) -> str:
    program = f"{PRELUDE}\nprint(connect('{world.EVIL}', 80, get('{host}')))"
    answer = client.post(f"/sandboxes/{sandbox}/exec", json={"command": ["python3", "-c", program], "timeout_s": 20})
    return str(answer.json()["stdout"])


def refused(client: httpx.Client, sandbox: str) -> list[str]:
    """What events tell of it."""
    found = client.get("/events", params={"sandbox_id": sandbox, "limit": 1000}).json()["items"]
    return [each["reason"] for each in found if each["reason"].startswith("network: ")]


def test_what_is_refused_cannot_drown_other_events(internet: Internet, folder: Path) -> None:
    home = folder / "drowning"
    with running_server(home, "native", **internet.environment()) as running, running.client() as client:
        sandbox = client.post("/sandboxes", json={"settings": {"network": {}}}).json()["id"]
        program = f"{PRELUDE}\nfor i in range(150): datagram('198.18.0.1', 53, question('n%d.test' % i), 3)"
        done = client.post(f"/sandboxes/{sandbox}/exec", json={"command": ["python3", "-c", program], "timeout_s": 50})
        assert done.json()["success"]
        while not any("more were refused" in reason for reason in refused(client, sandbox)):
            time.sleep(0.05)
        assert len(refused(client, sandbox)) < 40
        shown = client.get(f"/sandboxes/{sandbox}/network").json()["refusals"]
        assert len({each["name"] for each in shown}) >= 100, "its own log has them"
    asyncio.run(remove_all(Settings(home / "data", home / "run")))


def test_a_policy_is_set_changed_shown_and_kept(internet: Internet, folder: Path) -> None:
    home = folder / "server"
    with running_server(home, "native", **internet.environment()) as running, running.client() as client:
        made = client.post("/sandboxes", json={"settings": {"network": POLICY}})
        assert made.status_code == 200, made.text
        sandbox = made.json()["id"]
        assert '"at": "WEB"' in looked(client, sandbox, "allowed.test")
        assert looked(client, sandbox, "evil.test").startswith("HTTP/1.1 403")
        shown = client.get(f"/sandboxes/{sandbox}/network").json()
        assert [each["domain"] for each in shown["policy"]["rules"]] == ["allowed.test"]
        assert "evil.test" in {each["name"] for each in shown["refusals"]}
        assert any(each["process"].startswith("python3[") for each in shown["refusals"])
        while not (told := refused(client, sandbox)):
            time.sleep(0.05)
        assert "evil.test at 203.0.113.66:80 was refused for python3[" in told[0]
        assert "no rule allows it" in told[0]
        changed = client.put(f"/sandboxes/{sandbox}/network", json={"policy": {"allowed_domains": ["evil.test"]}})
        assert changed.status_code == 200, changed.text
        assert '"at": "EVIL"' in looked(client, sandbox, "evil.test")
        assert looked(client, sandbox, "allowed.test").startswith("HTTP/1.1 403")
        running.stop(signal.SIGKILL)
    with running_server(home, "native", **internet.environment()) as running, running.client() as client:
        assert '"at": "EVIL"' in looked(client, sandbox, "evil.test")
        assert looked(client, sandbox, "allowed.test").startswith("HTTP/1.1 403")
    asyncio.run(remove_all(Settings(home / "data", home / "run")))
