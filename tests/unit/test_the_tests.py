"""What runs the tests: whatever is missing is noticed, and whoever starts them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _pytest.outcomes import Skipped

from needs import missing, need

TREE = Path(__file__).parents[2]
SYNC_USE = "tests/sandbox/test_sync_use.py"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # those that a test does not need take seconds to load
}


def test_what_is_missing_is_a_skip_on_a_laptop_and_a_failure_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(Skipped, match="needs no-such-program: run 'scripts/setup test'"):
        need("no-such-program")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="needs no-such-program"):
        need("no-such-program")
    with pytest.raises(pytest.fail.Exception, match="no such privilege"):
        missing("no such privilege")
    need("sh")


def test_every_program_that_a_test_needs_is_installed_by_setup() -> None:
    scripts = "".join((TREE / "scripts" / name).read_text() for name in ("setup", "test-docker"))
    installed = set(re.findall(r"\bhave ([\w.-]+)", scripts)) | set(re.findall(r"([\w.-]+):[\w.-]+", scripts))
    texts = "".join(path.read_text() for path in (TREE / "tests").rglob("*.py") if path != Path(__file__))
    calls = re.findall(r"\bneeds?\(([^()]*)\)", texts)
    named = {name for call in calls for name in re.findall(r'"([\w.-]+)"', call)} - {"root"}
    assert {"newuidmap", "newgidmap", "zstd", "docker-registry"} <= named
    assert named - installed == set()


FLAKY = """
from pathlib import Path

def test_good(): pass

def test_race():
    mark = Path(__file__).with_name("mark")
    if not mark.exists():
        mark.touch()
        assert mark.name == "the first reason"

def fail():
    raise ValueError("the second reason")

def test_bad():
    fail()

def test_group():
    raise ExceptionGroup("together", [ValueError("the third reason")])
"""


def run_in_a_small_tree(tree: Path, test: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The runner with a tree of its own, which has one file of tests."""
    (tree / "tests").mkdir()
    shutil.copytree(TREE / "scripts", tree / "scripts")
    shutil.copy(TREE / "tests" / "progress.py", tree / "tests")
    (tree / ".venv").symlink_to(TREE / ".venv")
    markers = "markers =\n slow: .\n again: .\n docker: ."
    (tree / "pytest.ini").write_text(f"[pytest]\ntestpaths = tests\npythonpath = tests\n{markers}\n")
    (tree / "tests" / "conftest.py").write_text('pytest_plugins = ["progress"]\n')
    (tree / "tests" / "test_small.py").write_text(test)
    command = [sys.executable, str(tree / "scripts/run_tests.py"), *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)


def test_what_was_tried_twice_is_listed_with_its_first_reason(tmp_path: Path) -> None:
    done = run_in_a_small_tree(tmp_path, FLAKY)
    assert done.returncode == 1, done.stdout + done.stderr
    failed, _, listed = done.stdout.partition("Tried twice, and why the first time failed:")
    assert "FAILED: tests/test_small.py::test_bad\n" in failed
    assert "FAILED: tests/test_small.py::test_race\n" not in failed
    assert re.search(r"::test_race: passed the second time\n +E .*assert 'mark' == 'the first reason'", listed)
    places = r"\n +tests/test_small.py:\d+: \n +tests/test_small.py:\d+: ValueError\n"
    assert re.search(r"::test_bad: failed again\n +E +ValueError: the second reason" + places, listed)
    assert re.search(r"::test_group: failed again\n(.*\n)+? +\| ValueError: the third reason\n", listed)
    assert "test_good" not in listed
    assert "2 failed, 2 passed in 0:" in listed


def test_what_the_time_was_too_short_for_is_named(tmp_path: Path) -> None:
    test = "def test_first(): pass\ndef test_second(): pass\n"
    done = run_in_a_small_tree(tmp_path, test, "--minutes", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Not run:\n  most: no time was left\n" in done.stdout
    assert "no tests in 0:" in done.stdout
    late = ("-p", "no:cacheprovider", "--until", "0", "--events", "1")
    command = [sys.executable, "-m", "pytest", *late]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '["tests/test_small.py::test_first", "tests/test_small.py::test_second"]' in done.stdout
    assert '"outcome"' not in done.stdout, "no test began"


def test_what_breaks_pytest_itself_is_a_failure_told_in_full(tmp_path: Path) -> None:
    done = run_in_a_small_tree(tmp_path, "import no_such_module\n")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "No module named 'no_such_module'" in done.stdout


HANGING = """
import subprocess, threading
from pathlib import Path

def test_good(): pass

def test_that_never_ends():
    child = subprocess.Popen(["sleep", "3600"])
    Path(__file__).with_name("child").write_text(str(child.pid))
    threading.Event().wait()
"""


def test_a_test_that_hangs_is_killed_and_named_with_what_it_was_doing(tmp_path: Path) -> None:
    done = run_in_a_small_tree(tmp_path, HANGING, "--silence", "5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no test has ended for 0:05: killed" in done.stdout
    assert "\nstill running: tests/test_small.py::test_that_never_ends\n" in done.stdout
    assert re.search(r'test_small\.py", line \d+ in test_that_never_ends', done.stdout), done.stdout
    started_by_the_test = Path("/proc", (tmp_path / "tests" / "child").read_text(), "stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while ") Z " not in started_by_the_test.read_text():  # a zombie is dead, whether or not init collects it
            time.sleep(0.01)


def test_the_tests_may_be_started_with_interrupts_ignored() -> None:
    """As a script does with `&`."""
    test = f"{SYNC_USE}::test_ctrl_c_kills_the_command_and_cleans_up"
    pytest_ = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_asyncio.plugin",
        "-p",
        "pytest_timeout",
    ]
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *pytest_, test]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=TREE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
