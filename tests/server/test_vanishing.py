"""Clients that vanish in the middle of everything: five seconds later the server holds nothing of theirs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from needs import need
from server.conftest import Person
from server.running import RunningServer, running_server
from server.vanishing import ask, until

PROMISE_S = 5.0
PATIENCE_S = 20.0
Vanish = Callable[["subprocess.Popen[str]"], None]
CLIENT = Path(__file__).with_name("vanishing.py")
OURS, THEIRS = "10.213.77.1", "10.213.77.2"


class Holding:
    """What the server holds right now: streams, tasks, descriptors, directories, and processes in the sandbox."""

    def __init__(self, server: RunningServer, admin: httpx.Client, sandbox: str) -> None:
        self._server, self._admin, self._sandbox = server, admin, sandbox

    def now(self) -> dict[str, int]:
        text = self._admin.get("/metrics").text
        found = {
            name: int(value) for name, value in re.findall(r"^(atoll_tasks|process_open_fds) (\d+)\.0$", text, re.M)
        }
        found |= {kind: int(n) for kind, n in re.findall(r'^atoll_open_streams\{kind="(\w+)"\} (\d+)\.0$', text, re.M)}
        count = "pgrep -f '[s]leep 314|[y]es 314' | wc -l"
        ran = self._admin.post(f"{self._sandbox}/exec", json={"command": count}).json()
        found["processes"] = int(ran["stdout"])
        found["directories"] = len(list(self._server.folder.glob("state/transfers/*")))
        return found

    def until_as(self, before: dict[str, int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while more := {name: n for name, n in self.now().items() if n > before.get(name, 0)}:
            assert time.monotonic() < deadline, f"still held: {more}, before: {before}"
            time.sleep(0.1)


def prepare(client: httpx.Client) -> tuple[str, list[str]]:
    """A sandbox with something to download, and commands to follow."""
    sandbox = f"/sandboxes/{client.post('/sandboxes').json()['id']}"
    make = "truncate -s 256M large; mkdir folder; truncate -s 32M folder/f"
    assert client.post(f"{sandbox}/exec", json={"command": make}).json()["success"]
    wanted = {"command": "tail -f /dev/null"}
    return sandbox, [client.post(f"{sandbox}/commands", json=wanted).json()["id"] for _ in range(3)]


def everything_is_freed(server: RunningServer, key: str, how: str, prefix: list[str], vanish: Vanish) -> None:
    with server.client(key) as client, server.client() as admin:
        sandbox, commands = prepare(client)
        holding = Holding(server, admin, sandbox)
        for _ in range(3):  # what is opened once and kept is not counted
            holding.now()
        before = holding.now()
        arguments = [*prefix, sys.executable, str(CLIENT), how, server.url, key, sandbox, *commands]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "16"
            deadline = time.monotonic() + PATIENCE_S
            while (held := holding.now())["processes"] < 6:
                assert time.monotonic() < deadline, held
            kinds = ["command", "events", "watch", "terminal", "agent"] + (["download"] if how == "idle" else [])
            for kind in kinds:
                assert held[kind] > before.get(kind, 0), f"{kind} is not counted"
            assert held["process_open_fds"] > before["process_open_fds"] + 10
            vanish(process)
            holding.until_as(before, PROMISE_S)
            assert set(commands) <= {each["id"] for each in client.get(f"{sandbox}/commands").json()["items"]}, (
                "what is in the background goes on"
            )
            names = [entry["path"] for entry in client.get(f"{sandbox}/files").json()["items"]]
            assert [name for name in names if "half" in name] == []
        finally:
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()
            client.delete(sandbox)


def test_a_client_that_is_killed_leaves_nothing(server: RunningServer, ann: Person) -> None:
    def kill(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    everything_is_freed(server, ann.key, "idle", [], kill)


@pytest.fixture
def far_away() -> Iterator[str]:
    """A network namespace behind a cable that can be cut."""
    need("root", "ip")
    name, link = f"atoll-far-{os.getpid()}", f"far{os.getpid()}"[:15]
    ip("netns", "add", name)
    try:
        ip("link", "add", link, "type", "veth", "peer", "name", "cable", "netns", name)
        ip("addr", "add", f"{OURS}/30", "dev", link)
        ip("link", "set", link, "up")
        ip("-n", name, "addr", "add", f"{THEIRS}/30", "dev", "cable")
        ip("-n", name, "link", "set", "cable", "up")
        yield name
    finally:
        ip("netns", "del", name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20)


@pytest.mark.usefixtures("server")
def test_a_client_whose_cable_is_cut_leaves_nothing(session_folder: Path, far_away: str) -> None:
    """No word comes from it any more: neither an end nor a reset."""
    with running_server(session_folder / "cable", ATOLL_HOST=OURS) as server:
        assert server.key is not None

        def cut(_: subprocess.Popen[str]) -> None:
            ip("-n", far_away, "link", "set", "cable", "down")

        everything_is_freed(server, server.key, "reading", ["ip", "netns", "exec", far_away], cut)


@pytest.mark.usefixtures("server")
def test_a_client_that_takes_nothing_is_given_up(session_folder: Path) -> None:
    with running_server(session_folder / "takes", ATOLL_SLOW_S="1") as server, server.client() as client:
        assert server.key is not None
        sandbox, _ = prepare(client)
        with ask(server.url, server.key, f"GET {sandbox}/files/content?path=large") as sock:
            until(sock, b" 200 ")
            holding = Holding(server, client, sandbox)
            deadline = time.monotonic() + PATIENCE_S
            while holding.now()["download"]:
                assert time.monotonic() < deadline, "it is still waited for"
        # Whoever reads, however slowly, gets everything.
        with ask(server.url, server.key, f"GET {sandbox}/files/content?path=folder/f") as sock:
            seen = 0
            while seen < 32 << 20:
                time.sleep(0.01)
                piece = sock.recv(256 << 10)
                assert piece, f"cut after {seen} bytes"
                seen += len(piece)
