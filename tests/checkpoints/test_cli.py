"""`atoll checkpoint` and its kin, as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.engines.linux.engine import LinuxEngine
from atoll.settings import Settings


def atoll(settings: Settings, *words: str, code: int = 0) -> str:
    environment = {**os.environ, "ATOLL_DATA_DIR": str(settings.data_dir), "ATOLL_RUN_DIR": str(settings.run_dir)}
    environment.pop("ATOLL_URL", None)
    command = [sys.executable, "-c", "from atoll.cli import main; main()", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.timeout(240)
def test_going_back_by_hand(native: LinuxEngine, settings: Settings, tmp_path: Path) -> None:
    sandbox = atoll(settings, "create", "--engine", "native").strip()
    atoll(settings, "exec", sandbox, "--", "sh", "-c", "echo one >file")
    checkpoint = atoll(settings, "checkpoint", sandbox, "--name", "base").strip()
    atoll(settings, "exec", sandbox, "--", "rm", "file")
    assert checkpoint in atoll(settings, "checkpoints", sandbox)
    (exact,) = json.loads(atoll(settings, "checkpoints", sandbox, "--json"))
    assert (exact["id"], exact["name"], exact["created_at"][-1]) == (checkpoint, "base", "Z")
    assert atoll(settings, "diff", sandbox, "base") == "R /workspace/file\n"
    assert "no checkpoint 'other'" in atoll(settings, "rollback", sandbox, "other", code=125)
    atoll(settings, "rollback", sandbox, "base")
    assert atoll(settings, "exec", sandbox, "--", "cat", "file") == "one\n"
    (fork,) = atoll(settings, "fork", sandbox).split()
    assert atoll(settings, "exec", fork, "--", "cat", "file") == "one\n"
    assert atoll(settings, "snapshot", "create", sandbox, "mine") == "snapshot:mine\n"
    atoll(settings, "snapshot", "export", "mine", str(tmp_path / "file"))
    atoll(settings, "snapshot", "import", str(tmp_path / "file"), "again")
    assert atoll(settings, "run", "--engine", "native", "--image", "snapshot:again", "--", "cat", "file") == "one\n"
    assert "again" in atoll(settings, "snapshot", "ls")
    assert {each["name"] for each in json.loads(atoll(settings, "snapshot", "ls", "--json"))} == {"mine", "again"}
    atoll(settings, "restart", sandbox)
    assert "only 0 commands" in atoll(settings, "undo", sandbox, code=125)
    atoll(settings, "snapshot", "rm", "mine", "again")
    atoll(settings, "rm", sandbox, fork)
    assert "not found" in atoll(settings, "checkpoints", sandbox, code=125)
