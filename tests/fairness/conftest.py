"""A server with the engine `native`, whose event loop is watched, and two users: Mallory is hostile, Ann is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll.settings import Settings
from server.conftest import new_user
from server.running import ROOT, RunningServer, running_server


@dataclass
class Court:
    """The server and what is known of it."""

    server: RunningServer
    ann: httpx.Client
    mallory: httpx.Client
    mallory_key: str
    steps_file: Path

    def long_steps(self) -> list[dict[str, Any]]:
        """Every step of the event loop since the last look that took long."""
        if not self.steps_file.exists():
            return []
        found = [json.loads(line) for line in self.steps_file.read_text().splitlines()]
        self.steps_file.write_text("")
        return found

    @property
    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS"))

    def peak_rss_bytes(self) -> int:
        """Since the last call of `forget_peak`."""
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))

    def forget_peak(self) -> None:
        Path(f"/proc/{self.server.process.pid}/clear_refs").write_text("5")

    def sandbox(self, client: httpx.Client, **settings: object) -> str:
        answer = client.post("/sandboxes", json={"settings": settings} if settings else None)
        assert answer.status_code == 201, answer.text
        return f"/sandboxes/{answer.json()['id']}"


@pytest.fixture(scope="session")
def session_court(session_folder: Path, need_engine: Callable[[str, Settings], None]) -> Iterator[Court]:
    folder = session_folder / "fair"
    need_engine("native", Settings(data_dir=folder / "data", run_dir=folder / "run"))
    steps = session_folder / "steps"
    variables = {
        "ATOLL_TEST_STEPS": str(steps),
        "ATOLL_REGISTRIES": "127.0.0.0/8",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")]),
    }
    with (
        running_server(folder, "native", module="fairness.watched_server", **variables) as server,
        server.client() as admin,
    ):
        ann, mallory = new_user(admin, "ann"), new_user(admin, "mallory")
        with server.client(ann.key) as quiet, server.client(mallory.key) as hostile:
            court = Court(server, quiet, hostile, mallory.key, steps)
            # What is imported and made at the first use is not what the tests are about.
            sandbox = court.sandbox(quiet)
            quiet.post(f"{sandbox}/exec", json={"command": "true"})
            quiet.post(f"{sandbox}/checkpoints", json={"name": "one"})
            quiet.get(f"{sandbox}/checkpoints/one/diff")
            quiet.put(f"{sandbox}/files/content", params={"path": "f"}, content=b"x")
            yield court


@pytest.fixture
def court(session_court: Court) -> Iterator[Court]:
    session_court.long_steps()
    yield session_court
    for client in (session_court.ann, session_court.mallory):
        for info in client.get("/sandboxes/search").json()["items"]:
            client.delete(f"/sandboxes/{info['id']}")
