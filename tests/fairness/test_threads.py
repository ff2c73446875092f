"""One user's slow work does not keep another from theirs."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from fairness.conftest import Court
from fairness.silence import SilentRegistry

PATIENCE_S = 30
PROMPT_S = 10.0


@pytest.fixture
def silent() -> Iterator[SilentRegistry]:
    registry = SilentRegistry()
    yield registry
    registry.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def post(
    court: Court, path: str, body: object = None, method: str = "POST", *, data: bytes = b"", missing: int = 0
) -> socket.socket:
    """A request of Mallory's that nobody waits for. So many bytes of its body never come."""
    address = urlsplit(court.server.url)
    sock = socket.create_connection((address.hostname or "", address.port or 80), timeout=PATIENCE_S)
    data = json.dumps(body).encode() if body is not None else data
    head = (
        f"{method} /api/v1{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {court.mallory_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data) + missing}\r\n\r\n"
    )
    with contextlib.suppress(ConnectionError):  # it may be refused before all of it was sent
        sock.sendall(head.encode() + data)
    return sock


def round_trip(court: Court) -> float:
    """Create, exec, write, read, delete. Seconds."""
    began = time.monotonic()
    sandbox = court.sandbox(court.ann)
    assert court.ann.post(f"{sandbox}/exec", json={"command": "echo hello"}).json()["stdout"] == "hello\n"
    content = b"x" * 10_000
    assert court.ann.put(f"{sandbox}/files/content", params={"path": "f"}, content=content).status_code == 200
    assert court.ann.get(f"{sandbox}/files/content", params={"path": "f"}).content == content
    assert court.ann.delete(sandbox).status_code == 200
    return time.monotonic() - began


def test_silent_registries_keep_only_their_own_user_waiting(court: Court, silent: SilentRegistry) -> None:
    with contextlib.ExitStack() as waiting:
        for number in range(40):
            body = {"settings": {"image": f"127.0.0.1:{silent.port}/x/y:{number}"}}
            waiting.enter_context(post(court, "/sandboxes", body))
        until(lambda: len(silent.connections) >= 4, "nothing was pulled")
        assert round_trip(court) < PROMPT_S
        assert len(silent.connections) < 40, "one user holds more threads than a share"
    until(lambda: silent.open_connections() == 0, "a pull goes on though its client is gone")
    until(lambda: not court.mallory.get("/sandboxes/search").json()["items"], "a sandbox nobody waits for is made")
    assert court.long_steps() == []


def test_text_diffs_end_soon_and_with_their_clients(court: Court) -> None:
    sandbox = court.sandbox(court.mallory)
    choice = random.Random(5)

    def write() -> None:
        lines = "".join(f"{choice.randint(0, 2)}\n" for _ in range(5_000))
        for number in range(20):
            answer = court.mallory.put(f"{sandbox}/files/content", params={"path": f"f{number}"}, content=lines)
            assert answer.status_code == 200

    write()
    made = court.mallory.post(f"{sandbox}/checkpoints", json={"name": "one"})
    assert made.status_code == 201, made.text
    write()
    gone = [post(court, f"{sandbox}/checkpoints/one/diff?text=true", method="GET") for _ in range(6)]
    for sock in gone:
        sock.close()
    assert round_trip(court) < PROMPT_S
    began = time.monotonic()
    found = court.mallory.get(f"{sandbox}/checkpoints/one/diff", params={"text": True}).json()
    assert time.monotonic() - began < PROMPT_S
    assert len([change for change in found if change["text"]]) == 20
    assert court.long_steps() == []
