"""Fixtures for all kinds of tests."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.engines import registry
from atoll.settings import Settings
from needs import missing, need

pytest_plugins = ["progress"]
NeedEngine = Callable[[str, Settings], None]


def pytest_configure() -> None:
    """Restore SIGINT: a script that starts pytest with `&` makes it ignored, also for every program that a test
    starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        need(*mark.args)


@pytest.fixture(scope="session")
def need_engine() -> NeedEngine:
    """Return `need_engine(name, settings)`: if the engine does not work here, it skips the test, and fails it in CI."""

    def need_one(name: str, settings: Settings) -> None:
        found = registry.probe(name, settings, thorough=True)
        if not found.available:
            missing(f"engine '{name}': {'; '.join(found.reasons)}")

    return need_one


@pytest.fixture(scope="session")
def session_folder() -> Iterator[Path]:
    """A temporary directory with a short path, because socket paths are limited. Other users may pass through it."""
    folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def session_settings(session_folder: Path) -> Settings:
    """The settings of an installation that belongs to this run of the tests."""
    return Settings(data_dir=session_folder / "data", run_dir=session_folder / "run")


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Limit open files, so that code that opens a descriptor for each directory of a large tree fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 150, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
