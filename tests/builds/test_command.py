"""`atoll build` as it is typed."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli import app
from atoll.errors import SpecError
from atoll.settings import Settings
from builds.small_root import BASE, Workshop
from needs import needs


def environment(settings: Settings, more: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    places = {"ATOLL_DATA_DIR": str(settings.data_dir), "ATOLL_RUN_DIR": str(settings.run_dir)}
    return {**kept, **places, **(more or {})}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "atoll.cli", *arguments]


def atoll(settings: Settings, *arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=environment(settings, variables),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_build_prints_its_steps_and_then_the_image(workshop: Workshop) -> None:
    (workshop.context / "file").write_text("x")
    run = "RUN --mount=type=secret,id=key echo $WHO; cat /run/secrets/key"
    text = f"ARG WHO=nobody\nFROM {BASE}\nARG WHO\nCOPY file /\n{run}\n"
    arguments = ("-t", "typed", "--build-arg", "WHO=me", "--secret", "id=key,env=KEY", "-f", "-", str(workshop.context))
    done = atoll(workshop.settings, "build", *arguments, stdin=text, KEY="do-not-tell")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("typed  sha256:")
    assert "[2/2] RUN --mount" in done.stderr
    assert "  | me\n  | ***\n" in done.stderr
    again = atoll(workshop.settings, "build", *arguments, "--json", stdin=text, KEY="do-not-tell")
    events = [json.loads(line) for line in again.stdout.splitlines()]
    assert [event["kind"] for event in events] == ["plan", "cached", "cached", "image"]
    assert events[-1]["digest"] == done.stdout.split()[1]


def test_a_failure_is_told_in_three_lines(workshop: Workshop) -> None:
    (workshop.context / "Dockerfile").write_text(f"FROM {BASE}\nRUN echo why; tail /dev/zero\n")
    done = atoll(workshop.settings, "build", "--memory", "32m", str(workshop.context))
    assert done.returncode == 125
    *_, output, error, hint = done.stderr.splitlines()
    assert "why" in done.stderr
    assert output.startswith(("  | ", "[1/1]"))
    assert error == "atoll: Dockerfile:2: the command was killed: the memory of the build was used up"
    assert "--memory" in hint


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("build", "debian:bookworm"), "atoll image build debian:bookworm"),
        (("build", "no-such-directory"), "there is no directory"),
        (("image", "build", "."), "atoll build ."),
        (("build", "--secret", "id=x,src=/no/such/file"), "cannot be read"),
        (("build", "--timeout", "0"), "more than 0 seconds"),
        (("build", "--shell-on-failure"), "needs a terminal"),
    ],
)
def test_what_is_wrong_is_answered_with_what_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], answer: str
) -> None:
    monkeypatch.setenv("ATOLL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("ATOLL_URL", raising=False)
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, SpecError)
    assert answer in f"{error.reason}\n{error.hint}"


def read_until(terminal: int, end: bytes | None) -> bytes:
    """Return what a terminal shows until this text or, without one, until it is closed."""
    shown = b""
    while end is None or end not in shown:
        ready, _, _ = select.select([terminal], [], [], 30)
        assert ready, shown
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # it was closed
            return shown
        shown += piece
    return shown


def use_shell(workshop: Workshop) -> bytes:
    """Let a build fail in a terminal, look at the state in the shell that opens, and return what was shown."""
    ours, theirs = pty.openpty()
    arguments = ["setsid", "--ctty", *command("build", "--shell-on-failure", str(workshop.context))]
    own = environment(workshop.settings)
    with subprocess.Popen(arguments, env=own, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        try:
            shown = read_until(ours, b"# ")
            os.write(ours, b"cat /state && exit 0\n")
            shown += read_until(ours, None)
            assert process.wait(30) == 125
        finally:
            process.kill()
            os.close(ours)
    return shown


@needs("setsid")
async def test_a_shell_opens_in_the_state_where_it_failed(workshop: Workshop) -> None:
    (workshop.context / "Dockerfile").write_text(f"FROM {BASE}\nRUN echo the state > /state; false\n")
    shown = await asyncio.to_thread(use_shell, workshop)
    assert b"the command failed with exit code 1" in shown
    assert b"the state\r\n" in shown
    assert await workshop.remains() == []
