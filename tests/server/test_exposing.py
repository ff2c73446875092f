"""Exposed ports that are named at creation or while a sandbox runs, and what listens inside."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from atoll import AsyncSandbox, Sandbox, UnsupportedError
from atoll.errors import SpecError
from atoll.manager import Record
from atoll.model import SandboxSpec
from atoll.server.settings import ServerSettings
from atoll.service.exposed_ports import PortUrls
from server.conftest import Person
from server.running import RunningServer
from server.waiting import WEB, events, launch, run, start, until


def test_ports_are_named_at_creation_and_are_variables_inside(api: httpx.Client) -> None:
    ports = [{"name": "WORKER_1", "port": 8011}, {"name": "my-web", "port": 8000, "public": True}]
    ports += [{"name": "PATH", "port": 1}, {"name": "GIVEN", "port": 2}]
    info = start(api, exposed_ports=ports, env={"GIVEN": "mine"})
    shown = {url["name"]: (url["port"], url["public"]) for url in info["exposed_urls"]}
    assert shown == {"WORKER_1": (8011, False), "my-web": (8000, True), "PATH": (1, False), "GIVEN": (2, False)}
    assert not [label for label in info["labels"] if "port" in label]
    assert run(api, info["id"], "echo $WORKER_1 $my_web $GIVEN") == "8011 8000 mine\n"
    launch(api, info["id"], WEB, "8011")
    until(lambda: api.get(f"/sandboxes/{info['id']}/ports/8011/").status_code == 200)


def test_ports_at_creation_are_added_to_those_of_the_spec(api: httpx.Client) -> None:
    api.delete("/sandbox-specs/two-ports")
    ports = [{"name": "AGENT_SERVER", "port": 8000}, {"name": "WORKER_1", "port": 8011}]
    assert api.post("/sandbox-specs", json={"id": "two-ports", "exposed_ports": ports}).status_code == 201
    more = [{"name": "WORKER_1", "port": 9011}, {"name": "WORKER_2", "port": 8012}]
    info = start(api, sandbox_spec_id="two-ports", exposed_ports=more)
    assert {url["name"]: url["port"] for url in info["exposed_urls"]} == {
        "AGENT_SERVER": 8000,
        "WORKER_1": 9011,
        "WORKER_2": 8012,
    }
    twice = [{"name": "a", "port": 1}, {"name": "a", "port": 2}]
    assert api.post("/sandboxes", json={"exposed_ports": twice}).status_code in (400, 422)
    assert api.post("/sandboxes", json={"exposed_ports": [{"name": "a", "port": 0}]}).status_code == 422


def test_vscode_has_a_token_that_is_good_for_nothing_else(api: httpx.Client, native_server: RunningServer) -> None:
    settings = {"work_dir": "/workspace/my dir"}
    info = start(api, settings=settings, exposed_ports=[{"name": "VSCODE", "port": 8001}])
    (url,) = info["exposed_urls"]
    query = parse_qs(urlsplit(url["url"]).query)
    assert url["url"].startswith(f"{native_server.url}/api/v1/sandboxes/{info['id']}/ports/8001/?tkn=")
    assert query["folder"] == ["/workspace/my dir"]
    assert urlsplit(url["host_url"]).query == urlsplit(url["url"]).query
    assert run(api, info["id"], "printf %s $OH_SESSION_API_KEYS_0") == query["tkn"][0]
    assert query["tkn"][0] != info["session_api_key"]
    with native_server.client("", **{"X-Session-API-Key": query["tkn"][0]}) as inside:
        assert inside.get(f"/sandboxes/{info['id']}").status_code == 401
        assert inside.post(f"/sandboxes/{info['id']}/exec", json={"command": "true"}).status_code == 401


def test_a_port_is_exposed_while_the_sandbox_runs_and_hidden_again(api: httpx.Client) -> None:
    path = f"/sandboxes/{start(api)['id']}"
    launch(api, path.rpartition("/")[2], WEB, "8000")
    until(lambda: any(each["port"] == 8000 for each in api.get(f"{path}/ports").json()))
    assert api.get(f"{path}/ports/8000/").status_code == 403
    made = api.post(f"{path}/ports", json={"name": "WEB", "port": 8000})
    assert (made.status_code, made.json()["name"]) == (201, "WEB")
    assert api.get(f"{path}/ports/8000/").json()["path"] == "/"
    assert run(api, path.rpartition("/")[2], "echo $WEB") == "8000\n"
    (listed,) = (each for each in api.get(f"{path}/ports").json() if each["port"] == 8000)
    assert (listed["address"], listed["process"]) == ("127.0.0.1", "python3")
    assert run(api, path.rpartition("/")[2], f"cat /proc/{listed['pid']}/cmdline").startswith("python3\0program.py")
    assert [url["url"] for url in listed["exposed"]] == [made.json()["url"]]
    assert [url["port"] for url in api.get(path).json()["exposed_urls"]] == [8000]
    assert api.delete(f"{path}/ports/8000").status_code == 204
    assert api.get(f"{path}/ports/8000/").status_code == 403
    assert api.delete(f"{path}/ports/8000").status_code == 204, "it may be repeated"
    for number in range(64):
        assert api.post(f"{path}/ports", json={"name": f"P{number}", "port": 1000 + number}).status_code == 201
    assert api.post(f"{path}/ports", json={"name": "P0", "port": 7}).status_code == 201, "it replaces the one before"
    assert api.post(f"{path}/ports", json={"name": "TOO_MANY", "port": 8}).status_code == 429


def test_one_call_gives_a_link_to_a_port_that_was_not_exposed(
    client: httpx.Client, admin: httpx.Client, server: RunningServer, ann: Person
) -> None:
    info = start(client)
    path = f"/sandboxes/{info['id']}"
    assert client.post(f"{path}/port-links", json={"port": 8000}).status_code == 403
    scopes = ["read", "use"]
    weak = admin.post("/keys", json={"user_id": ann.id, "name": "weak", "scopes": scopes}).json()["key"]
    with server.client(weak) as without, server.client("", **{"X-Session-API-Key": info["session_api_key"]}) as session:
        for each in (without, session):
            assert each.post(f"{path}/port-links", json={"port": 8000, "expose": True}).status_code == 403
    launch(client, info["id"], WEB, "8000")
    link = client.post(f"{path}/port-links", json={"port": 8000, "expose": True}).json()["url"]
    until(lambda: httpx.get(link, trust_env=False).status_code == 200)
    with server.client(weak) as without:
        answer = without.post(f"{path}/port-links", json={"port": 8000, "expose": True})
        assert answer.status_code == 201, "it is exposed by now"


OPEN_MANY = """
import socket, time
held = [socket.create_server(("127.0.0.1", port)) for port in range(20000, 20200)]
time.sleep(10000)
"""


def test_an_event_tells_of_a_port_and_a_flood_of_them_is_bounded(api: httpx.Client) -> None:
    quiet, loud = start(api)["id"], start(api)["id"]
    launch(api, loud, OPEN_MANY)
    launch(api, quiet, WEB, "8123")
    (event,) = until(lambda: events(api, quiet, "port"))
    assert (event["data"]["port"], event["data"]["process"]) == (8123, "python3")
    assert event["reason"] == f"python3 (pid {event['data']['pid']}) listens on port 8123"
    assert (event["before"], event["after"], event["cause"]) == ("RUNNING", "RUNNING", None)
    flood = until(lambda: events(api, loud, "port"))
    assert len(flood) == 16
    assert "and 184 more ports are new" in flood[0]["reason"]


def test_the_sdk_lists_ports_and_gives_links(
    native_server: RunningServer, session_settings: Any, tmp_path: Path
) -> None:
    with Sandbox(server=native_server.url, api_key=native_server.key, ports={"WEB": 8000}) as sandbox:
        assert sandbox.exec("echo $WEB").stdout == "8000\n"
        assert sandbox.ports() == []
        sandbox.write_file("web.py", WEB)
        sandbox.start(["python3", "web.py", "8000"])
        (found,) = until(sandbox.ports)
        assert (found.port, found.address, found.process) == (8000, "127.0.0.1", "python3")
        with native_server.client() as client:
            (info,) = client.get("/sandboxes/search", params={"name": sandbox.id}).json()["items"]
            assert [(url["name"], url["port"]) for url in info["exposed_urls"]] == [("WEB", 8000)]
        link = sandbox.port_link(8000)
        assert urlsplit(link).path.startswith("/.atoll/~")


async def test_without_a_server_there_are_ports_but_no_links(session_settings: Any) -> None:
    async with AsyncSandbox(engine="bubblewrap", settings=session_settings, ports={"WEB": 8000}) as sandbox:
        assert (await sandbox.exec("echo $WEB")).stdout == "8000\n"
        assert await sandbox.ports() == []
        with pytest.raises(UnsupportedError, match="server"):
            await sandbox.port_link(8000)


@pytest.mark.timeout(120)
def test_the_command_line_exposes_lists_and_forwards(native_server: RunningServer, api: httpx.Client) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    environment = {**kept, "ATOLL_URL": native_server.url, "ATOLL_API_KEY": native_server.key or ""}

    def atoll(*arguments: str) -> str:
        command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    id = atoll("create", "--port", "WEB=8000").strip()
    assert run(api, id, "echo $WEB") == "8000\n"
    launch(api, id, WEB, "8000")
    until(lambda: api.get(f"/sandboxes/{id}/ports/8000/").status_code == 200)
    (listed,) = json.loads(atoll("ports", id, "--json"))
    assert (listed["port"], listed["process"], len(listed["exposed"])) == (8000, "python3", 1)
    assert "/.atoll/~" in atoll("expose", id, "OTHER=8001")
    command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", "port-forward", id, "0:8000"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as forward:
        assert forward.stdout is not None
        host, _, port = forward.stdout.readline().partition(" ")[0].rpartition(":")
        with socket.create_connection((host, int(port)), 20) as line:  # raw TCP: nothing of HTTP is needed on the way
            line.sendall(b"GET /raw HTTP/1.0\r\n\r\n")
            assert b'"/raw"' in line.makefile("rb").read()
        forward.terminate()


def test_the_urls_follow_a_pattern_of_the_operators(tmp_path: Path) -> None:
    given = {
        "ATOLL_EXPOSED_URL_PATTERN": "https://{name}--{sandbox_id}.box.example.org",
        "ATOLL_DATA_DIR": str(tmp_path),
    }
    settings = ServerSettings.load(given)
    urls = PortUrls("http://here:1", "localhost", settings.exposed_url_pattern)
    labels = {"exposed_port.WEB": "80/public", "exposed_port.VSCODE": "8001"}
    record = Record(id="abc", engine="native", spec=SandboxSpec(), labels=labels)
    assert [url.url for url in urls.of(record, "T")] == [
        "https://WEB--abc.box.example.org/",
        "https://VSCODE--abc.box.example.org/?tkn=T&folder=/workspace",
    ]
    for wrong in ("https://{sandbox_id}/", "https://{port}/", "{sandbox_id}.{port}", "https://{sandbox_id}.{port}.{x}"):
        with pytest.raises(SpecError, match="exposed_url_pattern"):
            ServerSettings.load({**given, "ATOLL_EXPOSED_URL_PATTERN": wrong})
