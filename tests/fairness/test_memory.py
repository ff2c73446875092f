"""One user does not fill the server's memory, nor its event loop."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from fairness.conftest import Court
from fairness.test_threads import PROMPT_S, post, round_trip, until

GROWTH_BYTES = 640 << 20
"""Three outputs of 64 MiB, which exist twice while they are joined, and pieces of answers. As JSON they would be
1,152 MiB more."""
FLOOD = 64 << 20
FLOODS = {
    "zeros": f"head -c {FLOOD} /dev/zero",
    "not text": f"head -c {FLOOD} /dev/zero | tr '\\0' '\\377'",
}


@contextlib.contextmanager
def unchecked(client: httpx.Client) -> Iterator[None]:
    """Large answers are not compared with openapi.json: that takes longer than the test."""
    hooks, client.event_hooks = client.event_hooks, {}
    try:
        yield
    finally:
        client.event_hooks = hooks


@pytest.mark.parametrize("kind", list(FLOODS))
def test_outputs_of_control_bytes_cost_little(court: Court, kind: str) -> None:
    """What three answers of 64 MiB become as JSON never exists as a whole."""
    court.forget_peak()
    before = court.rss_bytes  # the allocator keeps some of what earlier tests used
    sandbox = court.sandbox(court.mallory)
    court.long_steps()
    body = {"command": FLOODS[kind], "max_output_bytes": FLOOD, "timeout_s": 60}

    def flood(_: int) -> int:
        size = 0
        with court.mallory.stream("POST", f"{sandbox}/exec", json=body) as answer:
            assert answer.status_code == 200
            for piece in answer.iter_raw(1 << 20):
                size += len(piece)
        return size

    with unchecked(court.mallory), ThreadPoolExecutor(3) as clients:
        running = clients.map(flood, range(3))
        assert round_trip(court) < PROMPT_S
        assert all(size > 1 << 20 for size in running)
    assert court.peak_rss_bytes() - before < GROWTH_BYTES
    assert court.long_steps() == []


def test_a_large_answer_is_the_same_as_a_small_one(court: Court) -> None:
    sandbox = court.sandbox(court.ann)
    words = "print('\\u20ac\\x00\\\"\\\\' * 30000, end=''); import sys; sys.stderr.buffer.write(b'\\xff\\xe2' * 30000)"
    command = ["python3", "-c", words]
    found = court.ann.post(f"{sandbox}/exec", json={"command": command}).json()
    assert found["stdout"] == '\u20ac\0"\\' * 30_000
    assert found["stderr"] == (b"\xff\xe2" * 30_000).decode(errors="replace")
    assert (found["success"], found["truncated"], found["exit_code"], found["cause"]) == (True, False, 0, "exit")
    found = court.ann.post(f"{sandbox}/exec", json={"command": command, "encoding": "base64"}).json()
    assert len(found["stdout"]) == 4 * len(('\u20ac\0"\\' * 30_000).encode()) // 3


def test_what_does_not_fit_is_left_out_visibly(court: Court) -> None:
    """Beyond the bytes that may wait in memory for one user, outputs are cut as they are beyond their own limit."""
    sandbox = court.sandbox(court.mallory)
    both = f"yes | head -c {FLOOD}; yes | head -c {FLOOD} >&2"
    with unchecked(court.mallory):
        found = court.mallory.post(f"{sandbox}/exec", json={"command": both, "max_output_bytes": FLOOD}).json()
        assert found["truncated"]
        assert "bytes left out" in found["stderr"] + found["stdout"]
        assert len(found["stdout"]) + len(found["stderr"]) < 100 << 20
        again = court.mallory.post(f"{sandbox}/exec", json={"command": "yes | head -c 9000000"}).json()
    assert again["truncated"]  # by its own limit
    assert len(again["stdout"]) > 8 << 20


def test_what_is_appended_is_streamed(court: Court) -> None:
    court.forget_peak()
    before = court.rss_bytes
    sandbox = court.sandbox(court.mallory)
    court.long_steps()
    size = 96 << 20

    def pieces() -> Iterator[bytes]:
        for _ in range(size >> 20):
            yield b"\0" * (1 << 20)

    answer = court.mallory.post(f"{sandbox}/files/append", params={"path": "f"}, content=pieces())
    assert answer.json()["size_bytes"] == size
    assert court.peak_rss_bytes() - before < size // 2
    assert court.long_steps() == []


def test_large_bodies_are_counted_before_they_are_there(court: Court) -> None:
    """A body that a route gets as a whole is held for a user, who must be known, and have room."""
    body = json.dumps({"command": "true", "env": {"A": "x" * (7 << 20)}}).encode()
    with httpx.Client(base_url=f"{court.server.url}/api/v1", trust_env=False) as stranger:
        assert stranger.post("/sandboxes/x/exec", content=body).status_code == 401
    sandbox = court.sandbox(court.mallory)
    before = court.rss_bytes
    with contextlib.ExitStack() as waiting:
        for _ in range(60):
            sock = waiting.enter_context(post(court, f"{sandbox}/exec", missing=1, data=body))
            sock.setblocking(False)
        assert court.mallory.post(f"{sandbox}/exec", content=body).status_code == 429
        assert round_trip(court) < PROMPT_S
        assert court.rss_bytes - before < 250 << 20


def test_requests_at_once_have_a_limit_for_each_user(court: Court) -> None:
    sandbox = court.sandbox(court.mallory)
    waiting = [post(court, f"{sandbox}/exec", {"command": "sleep 60"}) for _ in range(260)]
    try:
        until(lambda: court.mallory.get("/sandboxes/search").status_code == 429, "there is no limit")
        refused = court.mallory.get("/sandboxes/search")
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["hint"]
        assert round_trip(court) < PROMPT_S
    finally:
        for sock in waiting:
            sock.close()
    until(lambda: court.mallory.get("/sandboxes/search").status_code == 200, "ended requests are still counted")


def test_a_list_of_many_files_is_no_long_step(court: Court) -> None:
    sandbox = court.sandbox(court.mallory)
    made = court.mallory.post(f"{sandbox}/exec", json={"command": "mkdir d; cd d; seq 30000 | xargs touch"})
    assert made.json()["success"], made.text
    court.long_steps()
    with unchecked(court.mallory):
        found: list[dict[str, object]] = []
        query = {"path": "d", "limit": "10000"}
        while True:
            page = court.mallory.get(f"{sandbox}/files", params=query).json()
            found += page["items"]
            if page["next_page_id"] is None:
                break
            query["page_id"] = page["next_page_id"]
    assert [entry["path"] for entry in found] == sorted(str(number) for number in range(1, 30_001))
    assert court.long_steps() == []
