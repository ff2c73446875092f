"""Ports inside a sandbox, seen from outside. The network may be off."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from atoll.settings import Settings
from needs import not_applicable
from network.attacks import run
from network.conftest import Kind, Make

SERVER = "python3 -m http.server -b 127.0.0.1 8000 -d /workspace"


def test_a_port_leads_inside_with_the_network_off(make: Make, kind: Kind) -> None:
    sandbox = make(kind, "none")
    sandbox.write_file("index.html", "coral")
    with sandbox.expose(8000) as forward:
        with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
            urllib.request.urlopen(forward.url, timeout=10).read()
        server = sandbox.start(SERVER)
        run(sandbox, "eventually('127.0.0.1', 8000, get('x'))")
        assert urllib.request.urlopen(forward.url, timeout=10).read() == b"coral", "what opens later works at once"
        assert urllib.request.urlopen(forward.url, timeout=10).read() == b"coral"
        address = forward.url
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=10)
    server.kill()


def test_a_port_is_the_sandboxs_own_and_not_the_hosts(make: Make, kind: Kind) -> None:
    """What listens on this machine at the same port is not reached."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as host_service:
        port = host_service.getsockname()[1]
        sandbox = make(kind, "none")
        with sandbox.expose(port) as forward, socket.create_connection(forward.address, timeout=10) as caller:
            assert caller.recv(10) == b""
        host_service.settimeout(0.1)
        with pytest.raises(TimeoutError):
            host_service.accept()


@pytest.mark.timeout(200)  # a program is started seven times
def test_the_command_line_forwards_sets_and_shows(settings: Settings, make: Make, kind: Kind, folder: Path) -> None:
    if kind["engine"] != "native":
        not_applicable("the same for every engine")
    sandbox = make(kind, {})
    environment = {"ATOLL_DATA_DIR": str(settings.data_dir), "ATOLL_RUN_DIR": str(settings.run_dir), "PATH": "/usr/bin"}

    def atoll(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("atoll")), *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=40, check=False)

    assert not run(sandbox, "connect('203.0.113.10', 80, get('allowed.test'))").count("WEB")
    assert atoll("network", "set", sandbox.id, "allowed.test,*.w.test").returncode == 0
    assert "WEB" in run(sandbox, "connect('203.0.113.10', 80, get('allowed.test'))")
    assert run(sandbox, "connect('203.0.113.10', 80, get('evil.test'))").startswith("HTTP/1.1 403")
    shown = atoll("network", "log", sandbox.id)
    assert "evil.test" in shown.stdout, shown
    assert "no rule allows it" in shown.stdout
    assert '"evil.test"' in atoll("network", "log", "--json", sandbox.id).stdout
    assert atoll("network", "set", sandbox.id, "some nonsense").returncode == 125
    with subprocess.Popen(
        [str(Path(sys.executable).with_name("atoll")), "port-forward", sandbox.id, "0:8000"],
        env=environment, stdout=subprocess.PIPE, text=True,
    ) as forwarding:  # fmt: skip
        assert forwarding.stdout is not None
        where = forwarding.stdout.readline().split(" ")[0]
        server = sandbox.start(SERVER)
        run(sandbox, "eventually('127.0.0.1', 8000, get('x'))")
        assert urllib.request.urlopen(f"http://{where}/", timeout=10).status == 200
        forwarding.terminate()
    server.kill()
