"""Group K: exposed ports through a server, on every engine that has policies, with the network off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from atoll.settings import Settings
from network.conftest import Kind, remove_all
from network.internet import Internet
from server.running import RunningServer, running_server
from server.test_port_hosts import SOCKETS, browser, entered, host_of, line

pytestmark = pytest.mark.timeout(200)  # a server is started


@contextlib.contextmanager
def taken_port() -> Iterator[tuple[int, socket.socket]]:
    """One of this machine's that something listens on."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        service.settimeout(0.2)
        yield service.getsockname()[1], service


@pytest.fixture(scope="session")
def server(kind: Kind, internet: Internet, folder: Path) -> Iterator[RunningServer]:
    home = folder / f"exposing-{kind['engine']}"
    variables = {"DOCKER_HOST": os.environ["DOCKER_HOST"]} if kind["engine"] == "docker" else {}
    with running_server(home, kind["engine"], **internet.environment(), **variables) as running:
        yield running
    asyncio.run(remove_all(Settings(home / "data", home / "run")))


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def start(client: httpx.Client, kind: Kind, *ports: int) -> dict[str, Any]:
    """A sandbox whose spec names these ports."""
    settings: dict[str, Any] = {name: kind[name] for name in ("image", "isolation") if name in kind}
    if "volumes" in kind:
        settings["volumes"] = [{"host": "/usr", "path": "/usr", "read_only": True}]
    name = "-".join(("web", *map(str, ports)))
    client.delete(f"/sandbox-specs/{name}")
    listed = [{"name": f"p{port}", "port": port} for port in ports]
    made = client.post("/sandbox-specs", json={"id": name, "settings": settings, "exposed_ports": listed})
    assert made.status_code < 300, made.text
    started = client.post("/sandboxes", json={"sandbox_spec_id": name})
    assert started.status_code == 201, started.text
    info: dict[str, Any] = started.json()
    return info


def serve(client: httpx.Client, info: dict[str, Any]) -> None:
    path = f"/sandboxes/{info['id']}"
    client.put(f"{path}/files/content", params={"path": "server.py"}, content=SOCKETS).raise_for_status()
    client.post(f"{path}/commands", json={"command": ["python3", "server.py"]}).raise_for_status()


def test_a_port_opens_by_path_by_host_and_by_websocket(server: RunningServer, client: httpx.Client, kind: Kind) -> None:
    info = start(client, kind, 8000)
    by_path = f"/sandboxes/{info['id']}/ports/8000"
    assert client.get(f"{by_path}/no").status_code == 502
    with browser(server, host_of(info)) as page:
        assert page.get("/").status_code == 401
        entered(client, info, page)
        closed = page.get("/no", headers={"Accept": "text/html"})
        assert closed.status_code == 502
        assert "nothing listens on port 8000" in closed.text
        serve(client, info)
        while (answer := page.get("/no")).status_code != 418:
            assert answer.status_code == 502
            time.sleep(0.02)
        assert client.get(f"{by_path}/no").status_code == 418
        headers = {"Cookie": page.headers["Cookie"], "Origin": f"http://{host_of(info)}"}
    with line(server, host_of(info), "/a?b", additional_headers=headers) as made:
        assert json.loads(made.recv(timeout=20))["path"] == "/a?b"
        made.send("hello")
        assert made.recv(timeout=20) == "olleh"
        with pytest.raises(InvalidStatus), line(server, host_of(info), "/", origin="http://evil.test"):
            pass
        client.delete(f"/sandboxes/{info['id']}").raise_for_status()
        with pytest.raises(ConnectionClosed):
            made.recv(timeout=20)


def test_a_port_leads_into_its_own_sandbox_and_nowhere_else(
    server: RunningServer, client: httpx.Client, kind: Kind
) -> None:
    """Neither to this machine, nor to a neighbour, nor to one that came later."""
    with taken_port() as (port, service):
        one, other = start(client, kind, 8000, port), start(client, kind, 8000, port)
        assert client.get(f"/sandboxes/{one['id']}/ports/{port}/").status_code == 502, "this machine's own port"
        with pytest.raises(TimeoutError):
            service.accept()
        serve(client, other)
        neighbour = f"/sandboxes/{other['id']}/ports/8000/no"
        while client.get(neighbour).status_code != 418:
            time.sleep(0.02)
        assert client.get(f"/sandboxes/{one['id']}/ports/8000/no").status_code == 502, "what the neighbour listens on"
        with browser(server, host_of(one)) as page:
            entered(client, one, page)
            assert page.get("/no").status_code == 502
            cookie = page.headers["Cookie"]
        with browser(server, host_of(other), Cookie=cookie) as page:
            assert page.get("/no").status_code == 401, "the cookie of a neighbour"
        for closed in (22, 1, 8001):
            assert client.get(f"/sandboxes/{other['id']}/ports/{closed}/").status_code == 403
        link = client.post(f"/sandboxes/{one['id']}/port-links", json={"port": 8000}).json()["url"]
        client.delete(f"/sandboxes/{one['id']}").raise_for_status()
        later = start(client, kind, 8000, port)
        serve(client, later)
        while client.get(f"/sandboxes/{later['id']}/ports/8000/no").status_code != 418:
            time.sleep(0.02)
        assert client.get(f"/sandboxes/{one['id']}/ports/8000/no").status_code in (404, 410)
        with browser(server, urlsplit(server.url).netloc) as page:
            assert page.get(urlsplit(link).path + "no").status_code == 401
        with browser(server, host_of(one), Cookie=cookie) as page:
            assert page.get("/no").status_code == 401
        for info in (other, later):
            client.delete(f"/sandboxes/{info['id']}").raise_for_status()
