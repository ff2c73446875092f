from __future__ import annotations

import pickle
import subprocess
import sys
import traceback

from atoll.errors import SandboxError, SandboxNotFoundError, SandboxTimeoutError


def test_the_text_is_one_line_and_a_traceback_shows_the_hint() -> None:
    error = SandboxNotFoundError("Sandbox x not found", hint="List them.")
    assert str(error) == "Sandbox x not found"
    assert error.hint == "List them."
    assert "".join(traceback.format_exception(error)).endswith("Sandbox x not found\nList them.\n")


def test_a_hint_may_change_and_other_notes_stay() -> None:
    error = SandboxError("no", hint="first")
    error.add_note("a note of a program")
    error.hint = "second"
    assert error.__notes__ == ["a note of a program", "second"]
    error.hint = None
    assert error.__notes__ == ["a note of a program"]


def test_it_survives_a_journey_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(SandboxTimeoutError("late", hint="wait", output="so far")))
    assert (str(error), error.hint, error.output, error.__notes__) == ("late", "wait", "so far", ["wait"])


def test_the_command_line_shows_both() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "run", "-e", "wrong", "true"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 125
    assert done.stderr.splitlines() == ["atoll: 'wrong' is not a variable", "Write NAME=VALUE."]


def test_what_the_command_line_says_does_not_control_the_terminal() -> None:
    command = [sys.executable, "-m", "atoll.cli", "run", "-e", "\x1b[2Jwrong", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 125
    assert "[2Jwrong' is not a variable" in done.stderr
    assert "\x1b" not in done.stderr
