"""`atoll doctor`: its table is what engines declare, and `--check` says whether they keep it."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from atoll.cli import capability_matrix, doctor, engine_check
from atoll.conformance import Bench, Check, host
from atoll.conformance.check import must
from atoll.engines import registry
from atoll.engines.diagnosis import Diagnosis, EngineLevel, diagnose
from atoll.errors import EngineNotFoundError, SpecError
from atoll.model import Capability
from atoll.settings import Settings
from needs import need

PROGRAM = """
import sys, tempfile
make, folder = tempfile.mkdtemp, sys.argv[1]
tempfile.mkdtemp = lambda **given: make(**{**given, "dir": folder})
sys.argv = ["atoll", "doctor", "--check", *sys.argv[2:]]
from atoll.cli import main
main()
"""
"""The command, with its directories where the test looks for what is left of them."""


@pytest.fixture(scope="module")
def diagnosis(session_settings: Settings) -> Diagnosis:
    return diagnose(session_settings)


@pytest.fixture
def levels(diagnosis: Diagnosis) -> tuple[EngineLevel, ...]:
    return diagnosis.levels


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory with a short path, because socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="ad-", dir="/tmp") as path:
        Path(path).chmod(0o755)
        yield Path(path)


def drawn(levels: tuple[EngineLevel, ...]) -> list[str]:
    screen = io.StringIO()
    console = Console(width=80, file=screen)
    for table in capability_matrix.tables(levels):
        console.print(table)
    return screen.getvalue().splitlines()


def test_every_capability_has_a_row() -> None:
    assert {row for row in capability_matrix.ROWS.values() if isinstance(row, Capability)} == set(Capability)


def test_the_table_shows_what_engines_declare(levels: tuple[EngineLevel, ...], session_settings: Settings) -> None:
    shown = {(level.engine, level.isolation): level.capabilities for level in levels}
    assert ("bubblewrap", "namespaces") in shown
    for name in {level.engine for level in levels}:
        engine = registry.get(name, session_settings)
        described = asyncio.run(engine.describe())
        assert shown[name, described.isolation] == described.capabilities
    lines = drawn(levels)
    assert max(len(line) for line in lines) <= 80
    for row, asked in capability_matrix.ROWS.items():
        (line,) = [line for line in lines if line.strip().startswith(row + " ")]
        answers = line.strip().removeprefix(row).split()
        if isinstance(asked, Capability):
            assert answers == ["yes" if asked in level.capabilities else "no" for level in levels]
        assert {"yes", "no"} >= set(answers)


def test_many_engines_fit_into_80_columns(levels: tuple[EngineLevel, ...]) -> None:
    lines = drawn(levels * 3)
    assert max(len(line) for line in lines) <= 80
    assert sum(line.count("bubblewrap") for line in lines) == 3
    assert not any("…" in line for line in lines)


def test_programs_read_it_as_json(
    diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda settings: diagnosis)
    doctor.doctor(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["auto"] in {level["engine"] for level in found["levels"]}
    assert {engine["name"] for engine in found["engines"]} == set(registry.names())
    assert found["machine"]["cpus"] >= 1
    assert found["default_limits"]["open_files"]


# --- --check ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "meant"), [("bubblwrap", "bubblewrap"), ("Native", "native"), ("dokcer", "docker")])
def test_an_unknown_engine_is_answered_with_the_nearest_name(wrong: str, meant: str) -> None:
    with pytest.raises(EngineNotFoundError) as caught:
        engine_check.check_engine(wrong, (), slow=False, as_json=False)
    assert (caught.value.hint or "").startswith(f"Did you mean '{meant}'?")


def test_checks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(SpecError, match="no check has 'no such' in its name"):
        engine_check.check_engine("bubblewrap", ["no such"], slow=False, as_json=False)


def test_it_says_what_is_kept_broken_and_not_applicable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def kept(bench: Bench) -> None:
        async with bench.sandbox() as sandbox:
            must((await sandbox.exec("true")).success, "it works")

    async def broken(bench: Bench) -> None:
        async with bench.sandbox() as sandbox:
            must((await sandbox.exec("false")).success, "it did not work")

    checks = [
        Check("group.kept", "It works.", kept, frozenset(), frozenset(), slow=False),
        Check("group.broken", "It works too.", broken, frozenset(), frozenset(), slow=False),
        Check("group.unfit", "It saves.", kept, frozenset({Capability.CHECKPOINTS}), frozenset(), slow=False),
        Check("group.slow", "It takes long.", broken, frozenset(), frozenset(), slow=True),
    ]
    monkeypatch.setattr(engine_check, "CHECKS", checks)
    assert engine_check.check_engine("bubblewrap", (), slow=False, as_json=False) == 1
    said = capsys.readouterr().out
    assert "BROKEN  group.broken\n  It works too.\n  Seen: it did not work\n" in said
    assert "Not applicable:\n    1  the engine does not declare checkpoints\n" in said
    assert said.endswith("bubblewrap: 1 kept, 1 broken, 1 not applicable\n")
    assert engine_check.check_engine("bubblewrap", ["kept", "unfit"], slow=False, as_json=True) == 0
    assert [check["outcome"] for check in json.loads(capsys.readouterr().out)["checks"]] == ["kept", "skipped"]


def test_elsewhere_than_on_a_terminal_each_check_is_a_line(folder: Path) -> None:
    chosen = ("--only", "isolation_level", "--only", "disk_space")
    command = [sys.executable, "-c", PROGRAM, str(folder), "bubblewrap", *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok ")
    assert lines[0].endswith("isolation.the_isolation_level_is_reported_as_it_is")
    assert lines[-1] == "bubblewrap: 1 kept, 0 broken, 1 not applicable"
    assert list(folder.iterdir()) == []


def test_ctrl_c_leaves_nothing_behind(folder: Path) -> None:
    """In the middle of a check, on a terminal, where there is a bar."""
    need("root")
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is ignored if the tests were started with `&`
        os.environ["TERM"] = "xterm-256color"  # a dumb one has no bar
        os.execv(sys.executable, [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), "native"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, b"\x18\x00\x50\x00\x00\x00\x00\x00")
    seen = b""
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        while not re.search(rb" ([3-9]|\d\d)/", seen):  # some checks are done, and one is at work
            piece = _read(screen)
            assert piece, seen.decode()
            seen += piece
        os.write(terminal, b"\x03")
        while piece := _read(screen):
            seen += piece
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    assert b"not run. Nothing is left behind." in seen
    assert list(folder.iterdir()) == []
    assert host.processes(str(folder)) == []
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()


def _read(screen: object) -> bytes:
    """The end of the program is an error of its terminal."""
    try:
        return screen.read(4096)  # type: ignore[attr-defined,no-any-return]
    except OSError:
        return b""
