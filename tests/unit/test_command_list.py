"""The commands of `atoll`, which are listed without importing them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from atoll.cli import COMMANDS, app

NAMES = [name for name, _, _ in COMMANDS]
runner = CliRunner()


def ask(*arguments: str, **variables: str) -> str:
    """Return what a new interpreter prints for a command, and after it the modules it has imported."""
    program = (
        "import sys\nfrom atoll.cli import main\nsys.argv[0] = 'atoll'\n"
        "try: main()\nfinally: print('IMPORTED', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


def test_every_command_is_listed_with_the_first_sentence_of_its_help() -> None:
    listed = runner.invoke(app, ["--help"], terminal_width=200).output
    group = typer.main.get_command(app)
    for name, _, help in COMMANDS:
        assert re.search(rf"^  {name} +{re.escape(help.removesuffix('.'))}", listed, re.MULTILINE), listed
        own = group.commands[name].imported().help  # type: ignore[attr-defined]
        assert " ".join(own.split()).startswith(help), f"the help of {name!r} has changed: change it in COMMANDS too"


@pytest.mark.parametrize("name", NAMES)
def test_every_command_and_what_is_below_it_has_its_own_help(name: str) -> None:
    pending = [[name]]
    while pending:
        words = pending.pop()
        shown = runner.invoke(app, [*words, "--help"], prog_name="atoll")
        assert shown.exit_code == 0, shown.output
        assert shown.output.startswith(f"Usage: atoll {' '.join(words)} ")
        _, _, below = shown.output.partition("\nCommands:\n")
        pending += [[*words, line.split()[0]] for line in below.splitlines() if re.match(r"  \w", line)]


def test_the_list_needs_none_of_the_commands() -> None:
    _, _, imported = ask("--help").partition("IMPORTED ")
    ours = {name for name in imported.split() if name.startswith("atoll")}
    traces = {"atoll.cli.traces", "atoll.tracing", "atoll.tracing.carried"}
    assert ours == {"atoll", "atoll.cli", "atoll.cli.listed_command", "atoll.errors", "atoll.printable"} | traces
    assert set(imported.split()).isdisjoint({"asyncio", "opentelemetry", "pydantic", "rich", "ssl"})


@pytest.mark.parametrize(
    "line", ["run", "exec", "create", "ls", "shell", "cp", "events", "snapshot ls", "spec pull", "key ls", "serve"]
)
def test_the_help_of_a_command_needs_none_of_its_work(line: str) -> None:
    shown, _, imported = ask(*line.split(), "--help").partition("IMPORTED ")
    assert shown.startswith(f"Usage: atoll {line} ")
    packages = {".".join(name.split(".")[:2]) for name in imported.split()}
    assert packages.isdisjoint({"atoll.engines", "atoll.model", "atoll.sandbox", "atoll.server", "httpx", "rich"})


def test_a_misspelt_command_is_refused_with_a_suggestion() -> None:
    refused = runner.invoke(app, ["rnu"])
    assert refused.exit_code == 2
    assert "No such command 'rnu'" in refused.output
    assert "'run'" in refused.output


def test_an_option_may_come_before_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_URL", "")  # which the option sets
    assert runner.invoke(app, ["--server", "http://127.0.0.1:1", "image", "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("line", "expected"),
    [("atoll check", "checkpoint\ncheckpoints\n"), ("atoll snapshot c", "create\n"), ("atoll run --mem", "--memory\n")],
)
def test_the_shell_completes_commands_and_their_options(line: str, expected: str) -> None:
    last = str(len(line.split()) - 1)
    completed = ask(_ATOLL_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=last)
    assert completed.partition("IMPORTED")[0] == expected
