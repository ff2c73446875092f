"""`make test` leaves out only what repeats the promise of a test that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.conformance import CHECKS

TREE = Path(__file__).parents[2]
LISTING = """
import json, os
from pathlib import Path

def pytest_collection_finish(session):
    Path(os.environ["LISTING"]).write_text(json.dumps([
        [item.nodeid, [mark.name for mark in item.iter_markers()]]
        for item in session.items
    ]))
"""


@dataclass(frozen=True)
class Listed:
    name: str
    marks: frozenset[str]

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]

    @property
    def is_short(self) -> bool:
        return not self.marks & {"slow", "again"}


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> list[Listed]:
    """All that there are."""
    folder = tmp_path_factory.mktemp("listing")
    (folder / "listing.py").write_text(LISTING)
    environment = {**os.environ, "PYTHONPATH": str(folder), "LISTING": str(folder / "tests")}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "listing"]
    subprocess.run(command, cwd=TREE, env=environment, check=True, stdout=subprocess.DEVNULL)
    found = json.loads((folder / "tests").read_text())
    return [Listed(name, frozenset(marks)) for name, marks in found]


def test_what_runs_again_has_a_sibling_that_always_runs(tests: list[Listed]) -> None:
    short = {test.function for test in tests if test.is_short}
    assert [test.name for test in tests if "again" in test.marks and test.function not in short] == []


def test_every_check_always_runs_on_native_and_on_bubblewrap(tests: list[Listed]) -> None:
    promises = {test.name for test in tests if test.is_short and "::test_promise[" in test.name}
    for check in CHECKS:
        if not check.slow:
            assert f"tests/native/test_conformance.py::test_promise[{check.name}]" in promises
            assert f"tests/conformance/test_engines.py::test_promise[bubblewrap-{check.name}]" in promises
