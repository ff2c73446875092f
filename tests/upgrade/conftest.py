"""Installations in which the version before has made sandboxes, and that must be empty in the end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.network import client
from atoll.settings import Settings
from docker import private_engine
from leftovers import leftovers
from needs import missing, need
from network.internet import Internet, offline_internet
from upgrade import version_before
from upgrade.version_before import OldTree

HERE = Path(__file__).parent
_COMMAND_S = 50


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("docker"):
            item.add_marker(pytest.mark.timeout(private_engine.START_S))  # the first one starts the engine


def pytest_sessionfinish() -> None:
    private_engine.stop()


@pytest.fixture(scope="session")
def compiled(session_folder: Path) -> OldTree:
    return version_before.unpack(session_folder / "before")


@pytest.fixture(scope="session")
def internet(session_folder: Path) -> Iterator[Internet]:
    if (reason := client.problem()) is not None:
        missing(reason)
    need("ip", "openssl")
    with offline_internet(session_folder / "net", capture=False) as made:
        yield made


@dataclass(frozen=True, slots=True)
class Installation:
    """Directories that the old code and ours find by the same variables."""

    folder: Path
    settings: Settings

    @property
    def environment(self) -> dict[str, str]:
        return {"ATOLL_DATA_DIR": str(self.settings.data_dir), "ATOLL_RUN_DIR": str(self.settings.run_dir)}

    def atoll(self, *words: str, by: OldTree | None = None) -> str:
        """What our command line prints, or that of the version before."""
        command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", *words]
        environment = {**os.environ, **self.environment, **({"PYTHONPATH": by.path} if by is not None else {})}
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=_COMMAND_S)
        assert done.returncode == 0, f"atoll {' '.join(words)}: {done.stderr[-2000:]}"
        return done.stdout

    def listed(self) -> dict[str, dict[str, Any]]:
        """All that `atoll ls` shows, by id."""
        return {row["id"]: row for row in json.loads(self.atoll("ls", "--json"))}

    def clear(self, by: OldTree | None = None) -> None:
        self.atoll("rm", "--all", by=by)
        self.atoll("gc", by=by)

    def left(self) -> list[str]:
        mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(self.folder) in line]
        return [*leftovers(self.settings), *mounts, *map(str, self.settings.run_dir.glob("network*"))]


@pytest.fixture
def installation(compiled: OldTree, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    """Our code deletes what the test has left in it. Then there is nothing of it on this machine."""
    folder = Path(tempfile.mkdtemp(prefix="au-", dir="/tmp"))
    folder.chmod(0o755)
    made = Installation(folder, Settings(folder / "data", folder / "run"))
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    try:
        made.clear()
        assert made.left() == []
    finally:
        if made.left():  # what our code cannot find goes all the same
            made.clear(by=compiled)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def old(compiled: OldTree, installation: Installation) -> OldTree:
    """One that the test may remove."""
    return compiled.copy(installation.folder / "old")
