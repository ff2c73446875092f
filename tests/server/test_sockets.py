"""WebSockets: terminals."""

from __future__ import annotations

import json

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from server.conftest import Person
from server.running import RunningServer


def address(server: RunningServer, path: str) -> str:
    return f"ws{server.url.removeprefix('http')}/api/v1{path}"


def test_a_terminal_shows_what_is_typed_and_says_how_it_ended(server: RunningServer, ann: Person, sandbox: str) -> None:
    headers = {"Authorization": f"Bearer {ann.key}"}
    url = address(server, f"{sandbox}/terminal?rows=10&columns=40")
    with connect(url, additional_headers=headers, proxy=None) as line:
        line.send(json.dumps({"resize": [33, 99]}))
        line.send(b"stty size; exit 7\n")
        shown, ended = b"", None
        for message in line:
            if isinstance(message, bytes):
                shown += message
            else:
                ended = json.loads(message)
    assert b"33 99" in shown
    assert ended == {"exit": 7}


def test_a_page_sends_its_credential_as_a_subprotocol(server: RunningServer, ann: Person, sandbox: str) -> None:
    url = address(server, f"{sandbox}/terminal?command=echo%20hello")
    with connect(url, subprotocols=[f"atoll.bearer.{ann.key}"], proxy=None) as line:  # type: ignore[list-item]
        assert any(isinstance(message, bytes) and b"hello" in message for message in line)


def test_a_terminal_ends_with_its_connection(
    server: RunningServer, ann: Person, client: httpx.Client, sandbox: str
) -> None:
    headers = {"Authorization": f"Bearer {ann.key}"}
    with connect(address(server, f"{sandbox}/terminal"), additional_headers=headers, proxy=None) as line:
        line.send(b"exec sleep 4711\n")
        command = "until pgrep -f 'sleep 4711'; do sleep 0.05; done"
        assert client.post(f"{sandbox}/exec", json={"command": command, "timeout_s": 20}).json()["success"]
    command = "while pgrep -xf 'sleep 4711'; do sleep 0.05; done"
    assert client.post(f"{sandbox}/exec", json={"command": command, "timeout_s": 20}).json()["success"]


@pytest.mark.parametrize("kind", ["terminal", "agent"])
def test_a_refused_socket_says_why(server: RunningServer, ann: Person, bob: Person, sandbox: str, kind: str) -> None:
    for key, status in (("", 401), ("atoll_x_y", 401), (bob.key, 404)):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with pytest.raises(InvalidStatus) as refused:
            connect(address(server, f"{sandbox}/{kind}"), additional_headers=headers, proxy=None)
        assert refused.value.response.status_code == status
        assert json.loads(bytes(refused.value.response.body or b""))["status"] == status
