"""Requests that are malformed, huge or slow, and clients that vanish: the server stays up and keeps nothing of them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from server.conftest import Person
from server.running import RunningServer, running_server

PATIENCE_S = 5


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def dial(server: RunningServer) -> socket.socket:
    address = urlsplit(server.url)
    assert address.hostname is not None
    return socket.create_connection((address.hostname, address.port or 80), timeout=PATIENCE_S)


def answer(sock: socket.socket) -> bytes:
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def healthy(server: RunningServer) -> bool:
    with server.client("") as client:
        return client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\0" * 1000,
        b"POST /api/v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /api/v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"POST /api/v1/sandboxes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nxyz",
        b"POST /api/v1/sandboxes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ],
)
def test_what_is_no_http_is_refused(server: RunningServer, raw: bytes) -> None:
    with dial(server) as sock:
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)
        data = answer(sock)
    assert data == b"" or data.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), data[:200]
    assert healthy(server)


def test_headers_have_a_size(server: RunningServer) -> None:
    with dial(server) as sock:
        data = b""
        try:
            sock.sendall(b"GET /api/v1/health HTTP/1.1\r\nHost: x\r\n")
            for number in range(2000):
                sock.sendall(b"X-%d: %s\r\n" % (number, b"a" * 1000))
        except OSError:
            pass
        data = answer(sock)
    assert data == b"" or data.startswith(b"HTTP/1.1 431")
    assert healthy(server)


def test_bodies_have_a_size(client: httpx.Client, server: RunningServer) -> None:
    headers = {"Content-Type": "application/json"}
    huge = client.post("/sandboxes", content=b" " * (9 << 20), headers=headers)
    assert (huge.status_code, huge.json()["code"]) == (413, "too_large")

    def unannounced() -> object:
        for _ in range(9):
            yield b" " * (1 << 20)

    chunked = client.post("/sandboxes", content=unannounced(), headers=headers)  # type: ignore[arg-type]
    assert chunked.status_code == 413
    assert healthy(server)


def test_deep_and_odd_json_is_refused(client: httpx.Client, server: RunningServer) -> None:
    headers = {"Content-Type": "application/json"}
    for body in (
        b"[" * 100_000,
        b'{"labels": {"a": "\\ud800"}}',
        b"\xff\xfe",
        b'{"lifetime_s": NaN}',
        b'{"lifetime_s": 1e999}',
    ):
        assert client.post("/sandboxes", content=body, headers=headers).status_code in (400, 422), body[:40]
    assert healthy(server)


def test_slow_clients_are_given_up(session_folder: Path, server: RunningServer) -> None:
    with running_server(session_folder / "slow", ATOLL_SLOW_S="0.5") as slow, dial(slow) as sock:
        head = f"POST /api/v1/keys HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {slow.key}\r\n"
        sock.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert answer(sock).startswith(b"HTTP/1.1 408")
        assert healthy(slow)


def open_streams(admin: httpx.Client, kind: str) -> int:
    for line in admin.get("/metrics").text.splitlines():
        if line.startswith(f'atoll_open_streams{{kind="{kind}"}}'):
            return int(float(line.rpartition(" ")[2]))
    return 0


def test_a_client_that_vanishes_takes_its_command_along(
    server: RunningServer, ann: Person, admin: httpx.Client, client: httpx.Client, sandbox: str
) -> None:
    body = json.dumps({"command": "echo started; exec sleep 31415"}).encode()
    head = f"POST /api/v1{sandbox}/exec/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ann.key}\r\n"
    with dial(server) as sock:
        sock.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        seen = b""
        while b"started\\n" not in seen:
            seen += sock.recv(4096)
        assert open_streams(admin, "command") >= 1
    command = {"command": "while pgrep -xf 'sleep 31415'; do sleep 0.05; done", "timeout_s": 15}
    assert client.post(f"{sandbox}/exec", json=command).json()["success"]
    until(lambda: open_streams(admin, "command") == 0, "a stream outlives its client")


def test_a_waiting_exec_ends_with_its_client(
    server: RunningServer, ann: Person, client: httpx.Client, sandbox: str
) -> None:
    body = json.dumps({"command": "exec sleep 27182"}).encode()
    head = f"POST /api/v1{sandbox}/exec HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ann.key}\r\n"
    with dial(server) as sock:
        sock.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        command = {"command": "until pgrep -xf 'sleep 27182'; do sleep 0.05; done", "timeout_s": 15}
        assert client.post(f"{sandbox}/exec", json=command).json()["success"]
    command = {"command": "while pgrep -xf 'sleep 27182'; do sleep 0.05; done", "timeout_s": 15}
    assert client.post(f"{sandbox}/exec", json=command).json()["success"]


def test_quiet_streams_end_with_their_clients(
    server: RunningServer, ann: Person, admin: httpx.Client, sandbox: str
) -> None:
    for path, kind in ((f"{sandbox}/files/watch", "watch"), ("/events/stream", "events")):
        before = open_streams(admin, kind)
        with dial(server) as sock:
            sock.sendall(f"GET /api/v1{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ann.key}\r\n\r\n".encode())
            assert sock.recv(15).startswith(b"HTTP/1.1 200")
            until(lambda kind=kind, before=before: open_streams(admin, kind) == before + 1, "it does not count")  # type: ignore[misc]
        until(lambda kind=kind, before=before: open_streams(admin, kind) == before, f"a {kind} outlives its client")  # type: ignore[misc]
