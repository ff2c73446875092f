"""What a server gives to sandboxes that ask for no limits, and how much its users may ask for."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from atoll.settings import Settings
from needs import need
from server.conftest import new_user
from server.running import RunningServer, new_folder, running_server

MIB = 1 << 20
CEILINGS = {
    "ATOLL_SANDBOX_MEMORY": "128m",
    "ATOLL_SANDBOX_PIDS": "60",
    "ATOLL_SANDBOX_DISK": "64m",
    "ATOLL_SANDBOX_CPUS": "1",
    "ATOLL_USER_PIDS": "100",
    "ATOLL_MAX_SANDBOX_MEMORY_BYTES": "256m",
    "ATOLL_MAX_SANDBOX_PIDS": "40",
    "ATOLL_MAX_SANDBOX_OPEN_FILES": "8192",
}
BOMB = """python3 -c '
import os, signal
for made in range(200):
    try:
        if os.fork() == 0: signal.pause()
    except OSError: break
print(made, flush=True)
os._exit(0)'"""


@pytest.fixture(scope="module")
def limited(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> Iterator[RunningServer]:
    need("root")
    need_engine("native", session_settings)
    with running_server(new_folder(session_folder, "limited"), "native", **CEILINGS) as running:
        yield running


@pytest.fixture(scope="module")
def chief(limited: RunningServer) -> Iterator[httpx.Client]:
    with limited.client() as client:
        yield client


def start(client: httpx.Client, **limits: object) -> httpx.Response:
    return client.post("/sandboxes", json={"settings": {"limits": limits}} if limits else {})


def test_the_limits_that_hold_are_reported(limited: RunningServer, chief: httpx.Client) -> None:
    with limited.client(new_user(chief, "ann").key) as client:
        info = start(client, cpus=0.5).json()
        assert info["limits"]["memory_bytes"] is None
        held = info["effective_limits"]
        assert (held["memory_bytes"], held["cpus"], held["disk_bytes"]) == (128 * MIB, 0.5, 64 * MIB)
        assert held["pids"] == 40  # the ceiling of ordinary users is below the default
        assert info["limits_left_out"] == []
        assert start(chief).json()["effective_limits"]["pids"] == 60


def test_only_administrators_ask_for_more_than_the_ceilings(limited: RunningServer, chief: httpx.Client) -> None:
    with limited.client(new_user(chief, "bob").key) as client:
        for limits in ({"memory_bytes": "300m"}, {"pids": 41}, {"disk_bytes": "1g"}, {"cpus": 4000}):
            answer = start(client, **limits)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
            spec = {"id": "big", "settings": {"limits": limits}}
            assert client.post("/sandbox-specs", json=spec).status_code == 403
        assert start(client, memory_bytes="256m", pids=40).status_code == 201
        assert start(chief, memory_bytes="300m", pids=80).status_code == 201
        shared = {"id": "shared", "settings": {"limits": {"pids": 80}}, "shared": True}
        assert chief.post("/sandbox-specs", json=shared).status_code == 201
        given = client.post("/sandboxes", params={"sandbox_spec_id": "shared"})
        assert given.json()["effective_limits"]["pids"] == 80


def test_defaults_count_against_quotas_and_processes_have_one(limited: RunningServer, chief: httpx.Client) -> None:
    carl = new_user(chief, "carl", max_pids=100, max_memory_bytes=1 << 40)
    with limited.client(carl.key) as client, concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: start(client), range(6)))
        assert sorted(answer.status_code for answer in answers) == [201, 201, 429, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert "processes" in refused.json()["detail"]
        assert start(client, pids=20).status_code == 201
        assert start(client, pids=2).status_code == 429


def test_one_user_takes_nothing_from_another(limited: RunningServer, chief: httpx.Client) -> None:
    """Three bombs of 40 processes in an account of 100; the other user's bomb is as large as its own limit allows."""
    with limited.client(new_user(chief, "dora").key) as greedy, limited.client(new_user(chief, "eve").key) as other:
        boxes = [start(greedy).json()["id"] for _ in range(3)]
        made = [
            int(greedy.post(f"/sandboxes/{box}/exec", json={"command": BOMB}).json()["stdout"]) for box in boxes[:2]
        ]
        assert all(25 < count < 40 for count in made)
        last = greedy.post(f"/sandboxes/{boxes[2]}/exec", json={"command": BOMB}).json()
        assert int(last["stdout"] or 0) < 25
        its = start(other).json()["id"]
        assert 25 < int(other.post(f"/sandboxes/{its}/exec", json={"command": BOMB}).json()["stdout"]) < 40
