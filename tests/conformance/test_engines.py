"""Every engine that is registered keeps every promise: each check of the conformance suite is one test.

Those of `docker`, whose images are not this machine's, are in tests/docker.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.conformance import CHECKS, Bench, Check, Outcome, run_one
from atoll.engines import registry
from atoll.settings import Settings
from needs import missing, not_applicable
from promises import OF_THE_ENGINE
from user_switch import UID

QUICK_S = 90
SLOW_S = 900

NeedEngine = Callable[[str, Settings], None]


ELSEWHERE = {"native", "oci", "docker"}
"""Engines with a suite of their own that runs all checks: with each runtime, with images that they need."""


@pytest.fixture(scope="session")
def benches(session_folder: Path) -> Iterator[dict[str, Bench]]:
    """One for each engine: what a bench finds out about an image is asked once."""
    made: dict[str, Bench] = {}
    yield made
    for bench in made.values():
        # An engine may hold a mounted file system: only without it can the directory be removed.
        asyncio.run(bench.engine.aclose())


@pytest.fixture
def bench(engine_name: str, benches: dict[str, Bench], session_folder: Path, need_engine: NeedEngine) -> Bench:
    if engine_name not in benches:
        # Another installation for each engine, so that what one leaves behind is not blamed on another.
        folder = session_folder / engine_name
        settings = Settings(data_dir=folder / "data", run_dir=folder / "run")
        need_engine(engine_name, settings)
        benches[engine_name] = Bench(registry.get(engine_name, settings), settings)
    return benches[engine_name]


def as_parameter(check: Check) -> object:
    marks = [pytest.mark.timeout(SLOW_S if check.slow else QUICK_S)]
    return pytest.param(check, id=check.name, marks=[*marks, pytest.mark.slow] if check.slow else marks)


def _engines() -> list[object]:
    names = [name for name in registry.names() if name not in ELSEWHERE]
    return [pytest.param(name, marks=pytest.mark.again) if name == "unsafe-none" else name for name in names]


@pytest.mark.filterwarnings("ignore::atoll.engines.unsafe_none.UnsafeWarning")
@pytest.mark.parametrize("check", [as_parameter(check) for check in CHECKS])
@pytest.mark.parametrize("engine_name", _engines())
async def test_promise(bench: Bench, check: Check) -> None:
    result = await run_one(bench, check)
    if result.outcome is Outcome.SKIPPED:
        not_applicable(result.reason)
    left = await bench.engine.list()
    for handle in left:  # the next check starts from nothing all the same
        await bench.engine.delete(handle)
    assert result.outcome is Outcome.KEPT, f"{check.promise}\n{result.reason}"
    assert left == []


def test_every_check_says_what_it_promises() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert [check.name for check in CHECKS if not check.promise.endswith(".")] == []


def as_another_user(*command: str) -> subprocess.CompletedProcess[str]:
    """The shell in between is started with no rights left, unlike what `setpriv` itself starts."""
    switch = ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups", "sh", "-c", 'exec "$@"', "sh"]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    return subprocess.run(
        [*switch, *command], env=environment, cwd="/", capture_output=True, text=True, errors="replace", timeout=200
    )


def python_of_another_user() -> str | None:
    """This Python, or one of the system's of the same version, whichever a user without rights can run."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/local/bin/{name}", f"/usr/bin/{name}"):
        if as_another_user(candidate, "-c", "import atoll.conformance").returncode == 0:
            return candidate
    return None


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "only",
    [
        pytest.param(tuple(OF_THE_ENGINE), id="of_the_engine"),
        pytest.param((), id="all", marks=pytest.mark.again),
    ],
)
def test_the_process_engine_keeps_its_promises_to_a_user_without_rights(
    session_settings: Settings, need_engine: NeedEngine, only: tuple[str, ...]
) -> None:
    """The same suite in a process that is not root, as most people run it."""
    if os.geteuid() != 0:
        not_applicable("these tests do not run as root, so they are that user's already")
    need_engine("bubblewrap", session_settings)
    if (python := python_of_another_user()) is None:
        missing("another user can run no Python with these packages: they are in a home directory")
    done = as_another_user(python, "-m", "atoll.conformance", "--engine", "bubblewrap", *only)
    broken = done.stdout[done.stdout.find("BROKEN") :] if "BROKEN" in done.stdout else done.stdout[-500:]
    assert done.returncode == 0, f"{broken}\n{done.stderr[-2000:]}"
