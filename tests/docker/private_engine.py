"""A Docker engine that belongs to these tests alone, started when the first test needs it.

With `ATOLL_TEST_DOCKER_HOST` an engine that is there already is used instead; it must have the images `atoll-test:*`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.engines.docker.api import endpoint
from atoll.engines.docker.api.endpoint import Endpoint
from atoll.engines.host.process_ref import descendants
from needs import missing, not_applicable

SCRIPT = Path(__file__).parents[2] / "scripts" / "test-docker"
DEBIAN, BUSYBOX, STATIC = "atoll-test:debian", "atoll-test:busybox", "atoll-test:static"
START_S = 400


@dataclass
class _Started:
    host: str = ""
    folder: str = ""
    problem: str = ""


_started = _Started()


def host() -> str:
    """Its DOCKER_HOST. Where there can be none the test is skipped, and in CI it fails."""
    if not _started.host and not _started.problem:
        _start()
    if _started.problem:
        missing(f"there is no Docker engine to test with: {_started.problem}")
    return _started.host


def where() -> Endpoint:
    return endpoint.parse(host())


def is_running() -> bool:
    """Whether some test has needed it."""
    return bool(_started.host)


def give_time_to_start(items: list[pytest.Item], folder: Path) -> None:
    """The first test below this folder starts the engine."""
    for item in items:
        if folder in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(START_S))


def stop() -> None:
    """May be repeated."""
    folder, _started.folder, _started.host = _started.folder, "", ""
    if folder:
        subprocess.run([SCRIPT, "stop", folder], check=True, timeout=120)


def start_another(options: str = "", disk: str = "") -> tuple[str, str]:
    """One more, for tests that stop it: its DOCKER_HOST and its folder. `disk` is how much it may store, in memory."""
    host()  # says whether there can be any
    folder = tempfile.mkdtemp(prefix="atd-", dir="/tmp")
    if disk:
        data = Path(folder, "data")
        data.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk}", "tmpfs", data], check=True)
    done = _script("start", folder, DOCKERD_OPTIONS=options)
    if done.returncode != 0:
        subprocess.run([SCRIPT, "stop", folder], check=True, timeout=120)
        missing(f"no second Docker engine ({options}): {done.stderr.strip()[-300:]}")
    return done.stdout.strip(), folder


@contextmanager
def stopped() -> Iterator[None]:
    """It hangs: its process stands still."""
    with _standing(int(Path(_started.folder, "pid").read_text())):
        yield


@contextmanager
def starting_nothing() -> Iterator[None]:
    """It answers, but the program that starts processes for it stands still."""
    if not _started.folder:
        not_applicable("the processes of this Docker engine are somebody else's")
    below = descendants(int(Path(_started.folder, "pid").read_text()))
    (pid,) = [pid for pid in below if Path(f"/proc/{pid}/comm").read_text() == "containerd\n"]
    with _standing(pid):
        yield


@contextmanager
def _standing(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def stop_another(folder: str) -> None:
    subprocess.run([SCRIPT, "stop", folder], check=True, timeout=120)


def docker(*arguments: str, host_: str | None = None) -> str:
    """What the `docker` program prints."""
    command = ["docker", "-H", host_ or host(), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def _start() -> None:
    if given := os.environ.get("ATOLL_TEST_DOCKER_HOST"):
        _started.host = given
        return
    if os.environ.get("CI") and (done := _script("install")).returncode != 0:
        _started.problem = done.stderr.strip()[-500:]
        return
    folder = tempfile.mkdtemp(prefix="atd-", dir="/tmp")
    done = _script("start", folder)
    _started.host, _started.folder = done.stdout.strip(), folder
    if done.returncode != 0:
        _started.problem = done.stderr.strip()[-500:]
        stop()


def _script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # Its output goes to files: dockerd inherits them, and nobody may wait for the end of a pipe that it holds.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        done = subprocess.run(
            [SCRIPT, *arguments], stdout=out, stderr=err, timeout=START_S, env={**os.environ, **variables}
        )
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, out.read(), err.read())
