"""A gateway that the version before has left running: its policies hold, and our code can change and replace it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from atoll import Sandbox
from atoll.settings import Settings
from docker import private_engine
from network import attacks, world
from network.attacks import run
from network.internet import Internet
from upgrade.conftest import Installation
from upgrade.version_before import OldTree

INJECT = [{"domain": "allowed.test", "headers": {"X-Secret": "CANARY-KEY"}}]
GET = "connect('{address}', 80, get('{name}'))"


def get(name: str) -> str:
    """What decides is the name that is asked for, not the address."""
    return GET.format(address=world.EVIL, name=name)


BOTH = f"[{get('allowed.test')}, {get('evil.test')}]"


def gateway_processes(settings: Settings) -> list[int]:
    """The older first: it starts the other again."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if os.fsencode(settings.run_dir / "network") in words:
            found.append(int(name))
    return sorted(found)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "engine", ["native", pytest.param("oci", marks=pytest.mark.again), pytest.param("docker", marks=pytest.mark.docker)]
)
def test_a_gateway_of_the_version_before(
    engine: str,
    old: OldTree,
    installation: Installation,
    internet: Internet,
    need_engine: Callable[[str, Settings], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in internet.environment().items():
        monkeypatch.setenv(name, value)
    spec: dict[str, Any] = {}
    if engine == "docker":
        monkeypatch.setenv("DOCKER_HOST", private_engine.host())
        spec = {"image": private_engine.DEBIAN, "volumes": ["/usr:/usr:ro"]}
    else:
        need_engine(engine, installation.settings)
    look = f"{attacks.PRELUDE}\nprint(json.dumps({get('evil.test')}))"
    wanted = {"engine": engine, "spec": spec, "kinds": ["online"], "at_once": 1, "inject": INJECT, "look": look}
    ids = old.run("sandboxes.py", wanted, installation.environment)["ids"]
    old.remove()
    online, changed = (Sandbox.attach(ids[name], engine=engine, timeout=40) for name in ("online", "changed"))
    assert [each.name for each in online.network_log()] == ["evil.test"], "what it was refused before"
    holds(online, "allowed.test", "WEB")
    holds(changed, "evil.test", "EVIL")

    theirs = gateway_processes(installation.settings)
    assert len(theirs) == 2
    kill(theirs[1])
    run(online, get("allowed.test").replace("connect", "eventually"))
    holds(online, "allowed.test", "WEB")
    # Old code answers our questions: to change, to link, to forget.
    online.set_network({"allowed_domains": ["evil.test"]})
    holds(online, "evil.test", "EVIL")
    online.set_network({"allowed_domains": ["allowed.test"], "inject": INJECT})
    with Sandbox(engine=engine, network={"allowed_domains": ["allowed.test"]}, timeout=40, **spec) as new:
        holds(new, "allowed.test", "WEB")
        assert gateway_processes(installation.settings)[0] == theirs[0], "it is still the old one"

    kill(theirs[0])
    while gateway_processes(installation.settings):
        time.sleep(0.01)
    assert "WEB" not in run(online, f"connect('{world.WEB}', 80, get('allowed.test'), wait=1)"), "nobody carries it"
    for sandbox in (online, changed):
        sandbox.detach()
    online, changed = (Sandbox.attach(ids[name], engine=engine, timeout=40) for name in ("online", "changed"))
    holds(online, "allowed.test", "WEB")
    holds(changed, "evil.test", "EVIL")
    assert gateway_processes(installation.settings)[0] != theirs[0]
    assert "CANARY-KEY" in run(online, get("allowed.test"))
    online.set_network("none")
    assert "WEB" not in json.dumps(run(online, BOTH))
    online.cleanup()
    changed.cleanup()


def holds(sandbox: Sandbox, allowed: str, answers: str) -> None:
    """It reaches this host and not the other."""
    reached, refused = run(sandbox, f"[{get(allowed)}, {get(({'allowed.test', 'evil.test'} - {allowed}).pop())}]")
    assert f'"at": "{answers}"' in reached
    assert refused.startswith("HTTP/1.1 403"), refused
