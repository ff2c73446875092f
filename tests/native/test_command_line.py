"""The command line closes what it opens: nothing stays mounted when there is no sandbox any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.settings import Settings
from needs import not_applicable


def atoll(settings: Settings, *arguments: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    environment = {**kept, "ATOLL_DATA_DIR": str(settings.data_dir), "ATOLL_RUN_DIR": str(settings.run_dir)}
    command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def mounts(settings: Settings) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4].startswith(f"{settings.data_dir}/")]


@pytest.mark.timeout(180)
def test_looking_and_removing_leave_nothing_mounted(settings: Settings) -> None:
    id = atoll(settings, "create", "--engine", "native")
    try:
        if not mounts(settings):
            not_applicable("the data directory needs no pool of its own")
        assert id in atoll(settings, "ls")
        assert atoll(settings, "exec", id, "--", "echo", "hi") == "hi"
    finally:
        assert atoll(settings, "rm", id) == id
    assert mounts(settings) == []
    atoll(settings, "ls")
    assert mounts(settings) == []
