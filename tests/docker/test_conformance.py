"""The `docker` engine keeps every promise: on Debian, on an image without glibc and bash, and through the API alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.conformance import CHECKS, Bench, Check, Outcome, run_one
from atoll.engines import registry
from atoll.engines.contract import GarbageCollecting
from atoll.engines.docker.engine import DockerEngine
from atoll.settings import Settings
from docker import private_engine
from needs import not_applicable
from promises import group_of, groups

BRIDGED = groups(
    "life_cycle", "exec", "background", "shells", "terminals", "files", "copied_trees", "port_connections", "adoption"
)
"""What goes through the stream. The rest is the same whichever way the stream takes."""
BUSYBOX = groups("exec", "shells")
"""What may need glibc or bash. The rest is the same whatever the image has, and left to `make test-all`."""


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
    is_again = kind == "busybox" and group_of(check) not in BUSYBOX
    marks = [pytest.mark.slow] if check.slow or kind == "bridged" else [pytest.mark.again] if is_again else []
    return pytest.param(kind, check, id=f"{kind}-{check.name}", marks=marks)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        as_parameter(kind, check)
        for kind in ("debian", "busybox", "bridged")
        for check in CHECKS
        if kind != "bridged" or group_of(check) in BRIDGED
    ],
)
async def test_promise(bench: Bench, check: Check) -> None:
    assert "docker" in registry.names()
    result = await run_one(bench, check)
    if result.outcome is Outcome.SKIPPED:
        not_applicable(result.reason)
    # What a process asked for that an earlier check killed, the engine may make only now.
    assert isinstance(bench.engine, GarbageCollecting)
    await bench.engine.gc()
    left = await bench.engine.list()
    for handle in left:  # the next check starts from nothing all the same
        await bench.engine.delete(handle)
    await bench.engine.aclose()
    assert result.outcome is Outcome.KEPT, f"{check.promise}\n{result.reason}"
    # What a process asked for that was then killed, the engine may make later: it is listed, and so it is found.
    assert left == [] or check.name == "recovery.a_creation_that_was_killed_is_cleaned_up"
