"""The pytest plugin of `scripts/run_tests.py`: it writes events as lines of JSON, and ends the run at a given time.

The first line lists the names of all tests, whatever the number of processes that run them. Each further line says that
a test has begun, or how it ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("progress")
    group.addoption("--events", type=int, metavar="FD", help="write a line of JSON for each test to this descriptor")
    group.addoption("--until", type=float, metavar="TIME", help="begin no test after this time, as of time.time()")


def pytest_configure(config: pytest.Config) -> None:
    events: int | None = config.getoption("--events")
    if events is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Events(events))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    until: float | None = item.config.getoption("--until")
    return True if until is not None and time.time() > until else None


class _Events:
    """Writes events, in the process that collects the results of all others."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._descriptor = descriptor
        self._has_collected = False
        self._running: dict[str, list[pytest.TestReport]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._collected(ids)

    def _collected(self, names: Iterable[str]) -> None:
        if not self._has_collected:
            self._has_collected = True
            self._write(list(names))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"begun": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Handle the end of a test: its teardown, or the death of its process, which xdist reports with another
        `when`."""
        reports = self._running.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when in ("setup", "call"):
            return
        del self._running[report.nodeid]
        worst = next((each for each in reports if each.failed), None) or next(
            (each for each in reports if each.skipped), report
        )
        self._write(
            {
                "test": report.nodeid,
                "outcome": worst.outcome,
                "seconds": sum(each.duration for each in reports),
                "text": "" if worst.passed else _text(worst),
            }
        )

    def _write(self, event: object) -> None:
        os.write(self._descriptor, json.dumps(event).encode() + b"\n")


def _text(report: pytest.TestReport) -> str:
    """Return why a test failed, with all that it printed; or why it was skipped."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    printed = [f"--- {title} ---\n{content}" for title, content in report.sections]
    return "\n".join([report.longreprtext, *printed])
