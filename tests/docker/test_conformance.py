"""The `docker` engine keeps every promise: on Debian, on an image without glibc and bash, and through the API alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.conformance import CHECKS, Bench, Check, Outcome, run_one
from atoll.engines import registry
from atoll.engines.base import Collecting
from atoll.engines.docker import DockerEngine
from atoll.settings import Settings
from docker import private_engine
from needs import not_applicable

BRIDGED = ("life", "commands", "background", "shells", "terminals", "files", "trees", "ports", "recovery")
"""What goes through the stream. The rest is the same whichever way the stream takes."""


@pytest.fixture(scope="session")
def benches() -> dict[str, Bench]:
    """What a bench finds out about an image is asked once."""
    return {}


@pytest.fixture
def bench(kind: str, benches: dict[str, Bench], session_folder: Path, docker_host: str) -> Bench:
    if kind not in benches:
        folder = session_folder / kind
        settings = Settings(data_dir=folder / "data", run_dir=folder / "run")
        engine = DockerEngine(settings, private_engine.where(), direct=kind != "bridged")
        image = private_engine.BUSYBOX if kind == "busybox" else private_engine.DEBIAN
        benches[kind] = Bench(engine, settings, image)
    return benches[kind]


def as_parameter(kind: str, check: Check) -> object:
    marks = [pytest.mark.slow] if check.slow or kind == "bridged" else []
    return pytest.param(kind, check, id=f"{kind}-{check.name}", marks=marks)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        as_parameter(kind, check)
        for kind in ("debian", "busybox", "bridged")
        for check in CHECKS
        if kind != "bridged" or check.name.partition(".")[0] in BRIDGED
    ],
)
async def test_promise(bench: Bench, check: Check) -> None:
    assert "docker" in registry.names()
    result = await run_one(bench, check)
    if result.outcome is Outcome.SKIPPED:
        not_applicable(result.reason)
    # What a process asked for that an earlier check killed, the engine may make only now.
    assert isinstance(bench.engine, Collecting)
    await bench.engine.gc()
    left = await bench.engine.list()
    for handle in left:  # the next check starts from nothing all the same
        await bench.engine.delete(handle)
    await bench.engine.aclose()
    assert result.outcome is Outcome.KEPT, f"{check.promise}\n{result.reason}"
    # What a process asked for that was then killed, the engine may make later: it is listed, and so it is found.
    assert left == [] or check.name == "recovery.a_creation_that_was_killed_is_cleaned_up"
