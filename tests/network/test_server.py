"""Policies through a server: set when a sandbox is made, changed and shown over the API, the same after a restart."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll import Sandbox
from atoll.errors import SpecError
from atoll.settings import Settings
from network import world
from network.attacks import PRELUDE, run
from network.conftest import remove_all
from network.internet import Internet
from server.running import running_server

pytestmark = pytest.mark.timeout(200)  # servers are started and restarted
POLICY = {"allowed_domains": ["allowed.test"]}


def looked(client: httpx.Client, sandbox: str, host: str) -> str:
    program = f"{PRELUDE}\nprint(connect('{world.EVIL}', 80, get('{host}')))"
    answer = client.post(f"/sandboxes/{sandbox}/exec", json={"command": ["python3", "-c", program], "timeout_s": 20})
    return str(answer.json()["stdout"])


def test_a_program_elsewhere_sets_and_sees_it(internet: Internet, folder: Path) -> None:
    """The same calls as on the sandbox's own machine."""
    home = folder / "remote"
    with running_server(home, "native", **internet.environment()) as running:
        options: dict[str, Any] = {"server": running.url, "api_key": running.key}
        secret = {"domain": "allowed.test", "headers": {"Authorization": "CANARY-KEY"}}
        with Sandbox(network={**POLICY, "inject": [secret]}, **options) as sandbox:
            assert "CANARY-KEY" in run(sandbox, f"connect('{world.EVIL}', 80, get('allowed.test'))")
            assert run(sandbox, f"connect('{world.EVIL}', 80, get('evil.test'))").startswith("HTTP/1.1 403")
            (refusal,) = [each for each in sandbox.network_log() if each.name == "evil.test"]
            assert refusal.rule == "no rule allows it"
            assert refusal.process.startswith("python3[")
            attached = Sandbox.attach(sandbox.id, **options)
            shown = attached.spec.network
            assert "CANARY" not in str(shown)
            attached.set_network(shown)
            attached.detach()
            assert "CANARY-KEY" in run(sandbox, f"connect('{world.EVIL}', 80, get('allowed.test'))"), "it stays"
            with pytest.raises(SpecError, match="never shown"):
                Sandbox(network=shown, **options).create()
            sandbox.set_network({"allowed_domains": ["evil.test"]})
            assert '"at": "EVIL"' in run(sandbox, f"connect('{world.EVIL}', 80, get('evil.test'))")
            attached = Sandbox.attach(sandbox.id, **options)
            attached.set_network("none")
            attached.detach()
            assert "EVIL" not in run(sandbox, f"connect('{world.EVIL}', 80, get('evil.test'))")
            sandbox.write_file("index.html", "coral")
            server = sandbox.start("python3 -m http.server -b 127.0.0.1 8000 -d /workspace")
            run(sandbox, "eventually('127.0.0.1', 8000, get('x'))")
            with sandbox.expose(8000) as forward:
                assert httpx.get(forward.url, trust_env=False).text == "coral", "ports lead inside from elsewhere too"
            server.kill()
        with pytest.raises(SpecError):
            Sandbox(network={"allowed_cidrs": ["not a range"]}, **options)
    asyncio.run(remove_all(Settings(home / "data", home / "run")))


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
        assert made.status_code == 201, made.text
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
        assert changed.status_code == 204, changed.text
        assert '"at": "EVIL"' in looked(client, sandbox, "evil.test")
        assert looked(client, sandbox, "allowed.test").startswith("HTTP/1.1 403")
        running.stop(signal.SIGKILL)
    with running_server(home, "native", **internet.environment()) as running, running.client() as client:
        assert '"at": "EVIL"' in looked(client, sandbox, "evil.test")
        assert looked(client, sandbox, "allowed.test").startswith("HTTP/1.1 403")
    asyncio.run(remove_all(Settings(home / "data", home / "run")))
