"""kill -9 of the server under load: nothing acknowledged is lost, nothing is doubled, clients go on."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from server.running import RunningServer, start_server

KILLS = int(os.environ.get("ATOLL_KILLS", "12"))
CLIENTS = 8


class Load:
    """One client: makes a sandbox, writes into it, reads back, deletes it, again and again, retrying what failed."""

    def __init__(self, number: int, url: str, key: str, over: threading.Event) -> None:
        self.over = over
        self.number = number
        self.client = httpx.Client(
            base_url=f"{url}/api/v1", headers={"Authorization": f"Bearer {key}"}, timeout=30, trust_env=False
        )
        self.done = self.failed = 0
        self.kept: dict[str, str] = {}
        """Sandboxes that were acknowledged and not deleted, with what was written to them."""
        self.problems: list[str] = []

    def run(self) -> None:
        round_ = 0
        while not self.over.is_set():
            round_ += 1
            name = f"load-{self.number}-{round_}"
            made = self.call("POST", "/sandboxes", json={"name": name}, headers={"Idempotency-Key": name})
            if made is None:
                continue
            id, text = made.json()["id"], f"text {name}"
            where = {"path": "f"}
            if self.call("PUT", f"/sandboxes/{id}/files/content", params=where, content=text.encode()) is not None:
                self.kept[id] = text
                read = self.call("GET", f"/sandboxes/{id}/files/content", params=where)
                if read is not None and read.text != text:
                    self.problems.append(f"{id} holds {read.text!r} instead of {text!r}")
            if len(self.kept) > 3:
                oldest = next(iter(self.kept))
                if self.call("DELETE", f"/sandboxes/{oldest}", missing_ok=True) is not None:
                    del self.kept[oldest]

    def call(self, method: str, path: str, *, missing_ok: bool = False, **options: object) -> httpx.Response | None:
        deadline = time.monotonic() + 90
        said = "nothing"
        while time.monotonic() < deadline:
            try:
                answer = self.client.request(method, path, **options)  # type: ignore[arg-type]
            except httpx.HTTPError as error:
                said = repr(error)
                time.sleep(0.05)
                continue
            if answer.is_success or (missing_ok and answer.status_code == 404):
                self.done += 1
                return answer
            said = answer.text
            if answer.status_code not in (429, 503):
                break
            time.sleep(0.05)
        self.failed += 1
        self.problems.append(f"{method} {path} failed for good: {said}")
        return None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("server")
def test_nothing_acknowledged_is_lost_however_often_the_server_is_killed(session_folder: Path) -> None:
    port = free_port()
    server = start_server(session_folder / "kill", port=port)
    assert server.key is not None
    over = threading.Event()
    loads = [Load(number, server.url, server.key, over) for number in range(CLIENTS)]
    threads = [threading.Thread(target=load.run) for load in loads]
    for thread in threads:
        thread.start()
    try:
        for _ in range(KILLS):
            time.sleep(random.uniform(0.2, 2.0))
            kill(server)
            server = start_server(session_folder / "kill", port=port)
    finally:
        over.set()
        for thread in threads:
            thread.join(120)
    try:
        check(server, loads)
    finally:
        with server.client() as client:
            for info in client.get("/sandboxes/search").json()["items"]:
                client.delete(f"/sandboxes/{info['id']}")
        assert server.stop() == 0
        assert server.process.stdout is not None
        server.process.stdout.close()
        for load in loads:
            load.client.close()


def check(server: RunningServer, loads: list[Load]) -> None:
    done, failed = sum(load.done for load in loads), sum(load.failed for load in loads)
    assert [problem for load in loads for problem in load.problems] == []
    assert done > KILLS
    assert done / (done + failed) >= 0.999
    with server.client() as client:
        there = client.get("/sandboxes/search").json()["items"]
        names = [info["name"] for info in there]
        assert len(names) == len(set(names)), "a sandbox was doubled"
        for load in loads:
            for id, text in load.kept.items():
                answer = client.get(f"/sandboxes/{id}/files/content", params={"path": "f"})
                assert (answer.status_code, answer.text) == (200, text)


def kill(server: RunningServer) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(10)
    assert server.process.stdout is not None
    server.process.stdout.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
