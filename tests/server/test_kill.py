"""kill -9 of the server under load: nothing acknowledged is lost, nothing is doubled or left over, streams go on."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.engines import registry
from atoll.engines.contract import GarbageCollecting
from atoll.settings import Settings
from leftovers import leftovers
from server.killing import Client, Follower, RestFollower, SdkFollower, Worker
from server.running import RunningServer, everything, launch, start_server

KILLS = int(os.environ.get("ATOLL_KILLS", "12"))
CLIENTS = 8
STREAMS = 4
ENGINE = os.environ.get("ATOLL_KILL_ENGINE", "bubblewrap")
PATIENCE_S = 60.0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("server")
def test_nothing_acknowledged_is_lost_however_often_the_server_is_killed(session_folder: Path) -> None:
    port, folder = free_port(), session_folder / "kill"
    server = start_server(folder, ENGINE, port)
    assert server.key is not None
    workers = [Worker(number, server.url, server.key) for number in range(CLIENTS)]
    followers: list[Follower] = [
        (RestFollower if number % 2 else SdkFollower)(number, server.url, server.key) for number in range(STREAMS)
    ]
    clients: list[Client] = [*workers, *followers]
    for client in clients:
        client.thread.start()
    try:
        for number in range(KILLS):
            some_work(clients, random.randint(1, 60))
            if number % 10 == 9:
                everybody_reads_on(followers)
            kill(server.process)
            if number % 4 == 0:  # also while it is still settling what the one before left
                starting = launch(folder, ENGINE, port)
                time.sleep(random.uniform(0.1, 1.5))
                kill(starting)
            server = start_server(folder, ENGINE, port)
        everybody_reads_on(followers)
    finally:
        for client in clients:
            client.stop()
        if sys.exc_info()[0] is not None:
            kill(server.process)
    try:
        promises_hold(clients)
        streams_are_whole(followers)
        writes_are_there(server, workers)
        nothing_is_doubled_or_left_over(server, workers, followers)
    finally:
        with server.client() as admin:
            for info in everything(admin):
                admin.delete(f"/sandboxes/{info['id']}")
        assert server.stop() == 0
        server.close()
    settings = Settings(folder / "data", folder / "run")
    asyncio.run(swept(settings))
    assert leftovers(settings) == []


async def swept(settings: Settings) -> None:
    """What a killed program was just writing is removed by `gc`; of sandboxes nothing may be left for it."""
    engine = registry.get(ENGINE, settings)
    if isinstance(engine, GarbageCollecting):
        assert not [each for each in await engine.gc() if "sandbox" in each or "leftovers" in each]
    await engine.aclose()


def some_work(clients: list[Client], calls: int) -> None:
    """The moment of death is counted in work, not in seconds: on a busy machine little may be done in many of them."""
    before = sum(client.done for client in clients)
    deadline = time.monotonic() + PATIENCE_S
    while sum(client.done for client in clients) < before + calls:
        assert time.monotonic() < deadline, [client.problems for client in clients]
        time.sleep(0.002)


def everybody_reads_on(followers: list[Follower]) -> None:
    """The streams live, after however many deaths."""
    before = [len(follower.text) for follower in followers]
    deadline = time.monotonic() + PATIENCE_S
    while any(len(follower.text) <= length for follower, length in zip(followers, before, strict=True)):
        assert time.monotonic() < deadline, [follower.problems for follower in followers]
        time.sleep(0.1)


def promises_hold(clients: list[Client]) -> None:
    done, failed = sum(client.done for client in clients), sum(client.failed for client in clients)
    retried = sum(client.retried for client in clients)
    print(f"{KILLS} kills: {done} calls done, {retried} tries failed, {failed} calls failed for good")
    assert [problem for client in clients for problem in client.problems] == []
    assert done > KILLS
    assert retried > 0, "nobody noticed"
    assert done / (done + failed) >= 0.999


def streams_are_whole(followers: list[Follower]) -> None:
    for follower in followers:
        assert follower.numbers == list(range(len(follower.numbers))), "output is missing, or came twice"
        assert follower.connections > KILLS / 2 or isinstance(follower, SdkFollower)


def writes_are_there(server: RunningServer, workers: list[Worker]) -> None:
    with server.client() as admin:
        for worker in workers:
            for id, text in worker.kept.items():
                answer = admin.get(f"/sandboxes/{id}/files/content", params={"path": "f"})
                assert (answer.status_code, answer.text) == (200, text)
            for id in worker.deleted:
                assert admin.get(f"/sandboxes/{id}").status_code in (404, 410)


def nothing_is_doubled_or_left_over(server: RunningServer, workers: list[Worker], followers: list[Follower]) -> None:
    """Exactly what was acknowledged and not deleted is there: in the store, and in the engine."""
    expected = [id for worker in workers for id in worker.kept] + [follower.sandbox_id for follower in followers]
    with server.client() as admin:
        there = everything(admin, limit=7)
    assert len(there) > 7, "one page only"
    assert len({info["name"] for info in there}) == len(there), "a sandbox was doubled"
    assert sorted(info["id"] for info in there) == sorted(map(str, expected))
    assert {info["status"] for info in there} == {"RUNNING"}
    engine = registry.get(ENGINE, Settings(server.folder / "data", server.folder / "run"))
    assert sorted(handle.sandbox_id for handle in asyncio.run(engine.list())) == sorted(map(str, expected))


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
