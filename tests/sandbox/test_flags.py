"""The flags of a new sandbox, as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll import Sandbox, SandboxError
from atoll.cli import app
from atoll.settings import Settings

Atoll = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def atoll(settings: Settings) -> Iterator[Atoll]:
    variables = {"ATOLL_DATA_DIR": str(settings.data_dir), "ATOLL_RUN_DIR": str(settings.run_dir)}
    own = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")} | variables

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-m", "atoll.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=own)

    yield run
    for each in Sandbox.list(settings=settings, labels={"test": "flags"}):
        Sandbox.attach(each.id, engine=each.engine, settings=settings).cleanup()


ENGINE = ("--engine", "bubblewrap", "--label", "test=flags")


def test_a_sandbox_is_described_by_flags_and_found_by_its_name(atoll: Atoll) -> None:
    flags = ["--name", "box", "--hostname", "box", "--work-dir", "/srv/w", "-e", "A=b=c", "--lifetime", "600"]
    made = atoll("create", *ENGINE, *flags)
    assert made.returncode == 0, made.stderr
    said = atoll("exec", "box", "--", "sh", "-c", "echo $(hostname) $(pwd) $A")
    assert said.stdout == "box /srv/w b=c\n"
    (row,) = json.loads(atoll("ls", "--json", "-l", "test=flags").stdout)
    assert (row["id"], row["name"], row["state"], row["labels"]) == (
        made.stdout.strip(),
        "box",
        "RUNNING",
        {"test": "flags"},
    )
    assert datetime.fromisoformat(row["created_at"]).tzinfo is not None
    again = atoll("create", *ENGINE, "--name", "box")
    assert again.returncode == 125
    assert "there is a sandbox of the name 'box' already" in again.stderr
    shown = atoll("ls").stdout
    assert "box" in shown
    assert atoll("rm", "box").returncode == 0


def test_what_is_used_is_shown_in_units_and_exactly_in_json(atoll: Atoll) -> None:
    id = atoll("create", *ENGINE).stdout.strip()
    (exact,) = json.loads(atoll("stats", id, "--json").stdout)
    assert {"memory_bytes", "cpu_s", "pids", "disk_bytes"} == exact.keys()
    shown = atoll("stats", id).stdout
    assert "bytes" not in shown
    assert "memory" in shown
    assert json.loads(atoll("logs", id, "--json").stdout) == [{"state": "RUNNING", "cause": None, "reason": ""}]


def test_flags_replace_what_a_file_says(atoll: Atoll, tmp_path: Path) -> None:
    file = tmp_path / "box.toml"
    file.write_text('hostname = "file"\nlifetime = 500\n[env]\nA = "1"\n')
    line = ("--", "sh", "-c", "echo $(hostname) $A")
    assert atoll("run", *ENGINE, "-f", str(file), *line).stdout == "file 1\n"
    assert atoll("run", *ENGINE, "-f", str(file), "--hostname", "flag", *line).stdout == "flag 1\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--memry", "1g", "--", "true"), "--memory"),
        (("rnu", "--", "true"), "'run'"),
        (("run", "--engine", "bubblerap", "--", "true"), "Did you mean 'bubblewrap'?"),
        (("create", "--spec", "s", "--memory", "1g", "--disk", "2g"), "there is no spec 's'"),
        (("shell", "some-id", "--name", "x"), "an existing sandbox and --name exclude each other"),
        (("create", "--label", "nonsense"), "'nonsense' is not a label"),
        (("exec", "nobody", "-e", "nonsense", "--", "true"), "'nonsense' is not a variable"),
        (("create", "--name", "a/b"), "'a/b' is not a valid name"),
        (("run", "--isolation", "vms", "--", "true"), "'namespaces', 'gvisor' or 'vm'"),
        (("create", "--port", "WEB=80"), "exposed ports need a server"),
    ],
)
def test_wrong_input_is_answered_with_what_is_right(words: tuple[str, ...], said: str, settings: Settings) -> None:
    variables = {"ATOLL_DATA_DIR": str(settings.data_dir), "ATOLL_RUN_DIR": str(settings.run_dir), "ATOLL_URL": ""}
    done = CliRunner().invoke(app, words, env=variables)
    assert done.exit_code != 0
    error = done.exception
    assert said in (f"{error} {error.hint}" if isinstance(error, SandboxError) else done.output)
