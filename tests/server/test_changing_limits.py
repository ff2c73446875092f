"""Limits that users change while their sandboxes run: within ceilings and quotas, and only of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll import AsyncSandbox
from atoll.errors import SandboxError, SandboxResourceError
from atoll.settings import Settings
from needs import need
from server.conftest import Person, new_user
from server.running import RunningServer, new_folder, running_server

MIB = 1 << 20
CEILINGS = {
    "ATOLL_SANDBOX_MEMORY": "128m",
    "ATOLL_SANDBOX_PIDS": "30",
    "ATOLL_SANDBOX_DISK": "64m",
    "ATOLL_SANDBOX_CPUS": "1",
    "ATOLL_MAX_SANDBOX_MEMORY_BYTES": "256m",
    "ATOLL_MAX_SANDBOX_PIDS": "40",
    "ATOLL_MAX_SANDBOX_DISK_BYTES": "128m",
}


@pytest.fixture(scope="module")
def limited(
    session_folder: Path, session_settings: Settings, need_engine: Callable[[str, Settings], None]
) -> Iterator[RunningServer]:
    need("root")
    need_engine("native", session_settings)
    with running_server(new_folder(session_folder, "changing"), "native", **CEILINGS) as running:
        yield running


@pytest.fixture(scope="module")
def chief(limited: RunningServer) -> Iterator[httpx.Client]:
    with limited.client() as client:
        yield client


@pytest.fixture(scope="module")
def ann(chief: httpx.Client) -> Person:
    return new_user(chief, "ann")


@pytest.fixture
def client(limited: RunningServer, ann: Person) -> Iterator[httpx.Client]:
    with limited.client(ann.key) as client:
        yield client
        for info in client.get("/sandboxes/search").json()["items"]:
            client.delete(f"/sandboxes/{info['id']}")


def made(client: httpx.Client, **body: Any) -> str:
    return f"/sandboxes/{client.post('/sandboxes', json=body).json()['id']}"


def in_force(client: httpx.Client, box: str) -> dict[str, Any]:
    return dict(client.get(f"{box}/limits").json()["effective_limits"])


def test_what_is_named_changes_and_is_shown_everywhere(client: httpx.Client) -> None:
    box = made(client)
    answer = client.patch(f"{box}/limits", json={"memory": "200m", "cpus": 0.5})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["limits"] | {"memory_bytes": 200 * MIB, "cpus": 0.5, "pids": None} == found["limits"]
    assert found["effective_limits"]["pids"] == 30
    assert found["changeable"] == ["memory", "cpus", "pids", "disk"]
    assert client.get(f"{box}/limits").json() == found
    info = client.get(box).json()
    assert (info["limits"], info["effective_limits"]) == (found["limits"], found["effective_limits"])
    assert client.get(f"{box}/settings").json()["limits"] == found["limits"]
    took = client.post(f"{box}/exec", json={"command": ["python3", "-c", "bytearray(150 << 20)"]})
    assert took.json()["exit_code"] == 0
    # other names that are accepted for the same limits
    assert client.patch(f"{box}/limits", json={"memoryBytes": 100 * MIB, "cpu": 1}).json()["limits"]["cpus"] == 1


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ('{"memory": "257m"}', 403, "only administrators"),
        ('{"pids": 41, "memory": "200m"}', 403, "only administrators"),
        ('{"cpus": 4000}', 403, "only administrators"),
        ('{"disk": "1t"}', 403, "only administrators"),
        ('{"memory": 1e300}', 422, "memory"),
        ('{"memory": 100000000000000000000000000}', 422, "memory"),
        ('{"cpus": NaN}', 422, ""),
        ('{"cpus": Infinity}', 422, ""),
        ('{"cpus": -1}', 422, "cpus"),
        ('{"pids": true}', 422, "pids"),
        ('{"memory": -5}', 422, "memory"),
        ('{"memory": "200m", "memory_bytes": 1}', 422, "given twice"),
        ('{"memori": "200m"}', 422, "Did you mean 'memory'?"),
        ('{"open_files": 100}', 422, "not an option"),
        ("{}", 422, "no limit is named"),
        ('{"disk": "2m", "pids": 35}', 507, "more than the new limit"),
        ("[]", 422, ""),
    ],
)
def test_whoever_asks_for_too_much_or_for_nonsense_changes_nothing(
    client: httpx.Client, body: str, status: int, words: str
) -> None:
    box = made(client)
    client.post(f"{box}/exec", json={"command": "head -c 5m /dev/urandom >file; sync"})
    before = client.get(f"{box}/limits").json()
    answer = client.patch(f"{box}/limits", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, words in answer.text) == (status, True), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert client.get(f"{box}/limits").json() == before


def test_nobody_changes_the_limits_of_anothers(
    limited: RunningServer, chief: httpx.Client, client: httpx.Client
) -> None:
    box = made(client)
    session = client.get(box).json()["session_api_key"]
    with limited.client(new_user(chief, "bob").key) as other:
        assert other.patch(f"{box}/limits", json={"pids": 3}).status_code == 404
        assert other.get(f"{box}/limits").status_code == 404
    with limited.client("", **{"X-Session-API-Key": session}) as inside:
        assert inside.patch(f"{box}/limits", json={"pids": 40}).status_code == 403
        assert inside.get(f"{box}/limits").status_code == 200
    assert in_force(client, box)["pids"] == 30
    assert chief.patch(f"{box}/limits", json={"pids": 80}).json()["effective_limits"]["pids"] == 80


def test_quotas_hold_however_many_raise_at_once(limited: RunningServer, chief: httpx.Client) -> None:
    """Three with 30 processes each, and 110 allowed: of many that want 40, two get it."""
    carl = new_user(chief, "carl", max_pids=110)
    with limited.client(carl.key) as client, concurrent.futures.ThreadPoolExecutor(12) as pool:
        boxes = [made(client) for _ in range(3)]
        wanted = [*boxes, *boxes, *boxes, *boxes]
        list(pool.map(lambda box: client.patch(f"{box}/limits", json={"pids": 40}), wanted))
        assert sorted(in_force(client, box)["pids"] for box in boxes) == [30, 40, 40]
        refused = client.post("/sandboxes", json={"settings": {"pids": 2}})
        assert (refused.status_code, refused.json()["code"]) == (429, "limit_reached")
        # a lower limit is always granted, and is free for others at once
        assert client.patch(f"{boxes[0]}/limits", json={"pids": 20}).status_code == 200
        assert client.post("/sandboxes", json={"settings": {"pids": 10}}).status_code == 201


def test_a_paused_sandbox_has_to_be_resumed_first(client: httpx.Client) -> None:
    box = made(client)
    assert client.post(f"{box}/pause").is_success
    answer = client.patch(f"{box}/limits", json={"memory": "200m"})
    assert (answer.status_code, answer.json()["code"]) == (409, "sandbox_paused")
    assert client.post(f"{box}/resume").is_success
    assert client.patch(f"{box}/limits", json={"memory": "200m"}).status_code == 200


def test_one_that_has_ended_is_gone(client: httpx.Client) -> None:
    box = made(client)
    assert client.delete(box).is_success
    assert client.patch(f"{box}/limits", json={"memory": "200m"}).status_code == 410


def test_clients_that_vanish_leave_one_answer_for_all(
    client: httpx.Client, limited: RunningServer, ann: Person
) -> None:
    """Whenever a client goes away, the journal and the engine agree afterwards."""
    box = made(client)
    for size in range(100, 130, 3):
        with limited.client(ann.key) as brief:
            with contextlib.suppress(httpx.TimeoutException):
                brief.patch(f"{box}/limits", json={"memory": f"{size}m"}, timeout=0.001 * (size - 99))
    assert client.patch(f"{box}/limits", json={"pids": 35}).status_code == 200

    def agree() -> bool:
        """Whether the journal has what a fork has, which is what the engine has. An abandoned request may go on."""
        (fork,) = client.post(f"{box}/fork", json={}).json()
        client.delete(f"/sandboxes/{fork['id']}")
        return bool(in_force(client, box) == fork["effective_limits"])

    deadline = time.monotonic() + 20
    while not agree():
        assert time.monotonic() < deadline
    assert in_force(client, box)["memory_bytes"] in [128 * MIB, *(size * MIB for size in range(100, 130, 3))]


async def test_the_same_through_the_sdk_and_the_command_line(limited: RunningServer, ann: Person) -> None:
    async with AsyncSandbox(server=limited.url, api_key=ann.key) as box:
        found = await box.set_limits(memory="200m", pids=35)
        assert (found.limits.memory_bytes, found.limits.pids) == (200 * MIB, 35)
        assert found == await box.info()
        assert (await box.exec(["python3", "-c", "bytearray(150 << 20)"], timeout=20)).success
        with pytest.raises(SandboxError, match="only administrators"):
            await box.set_limits(memory="1g")
        await box.exec("head -c 5m /dev/urandom >file; sync", timeout=20)
        with pytest.raises(SandboxResourceError):
            await box.set_limits(disk="2m")

        def atoll(*arguments: str) -> subprocess.CompletedProcess[str]:
            environment = {**os.environ, "ATOLL_URL": limited.url, "ATOLL_API_KEY": ann.key}
            command = [sys.executable, "-m", "atoll.cli", "limits", *arguments]
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)

        id = box.access.listed_id()
        changed = await asyncio.to_thread(atoll, id, "--memory", "150m", "--cpus", "0.5", "--json")
        assert json.loads(changed.stdout)["limits"]["memory_bytes"] == 150 * MIB
        shown = await asyncio.to_thread(atoll, id)
        assert "150.0 MiB" in shown.stdout
        refused = await asyncio.to_thread(atoll, id, "--memory", "1g")
        assert refused.returncode == 125
        assert "only administrators" in refused.stderr
