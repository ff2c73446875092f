"""The law on every runtime of the `oci` engine. A check that asks nothing of a runtime is no test of it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.conformance import CHECKS, Check, Outcome, run_one
from atoll.engines.linux.oci_engine import OciEngine
from atoll.settings import Settings
from oci.benches import RUNTIMES, RuntimeBench
from oci.conftest import NeedRuntime, empty
from oci.remains import remains
from promises import OF_THE_ENGINE, group_of, groups

QUICK_S, SLOW_S = 90, 900
OF_THE_RUNTIME = groups("isolation", "saved_states", "adoption")
ONLY_FOR_OTHERS = {"files.what_may_not_be_read_is_refused": "inside, the agent's user is root, who may read everything"}


def _is_again(runtime: str, check: Check) -> bool:
    """Whether `native` keeps the same promise by the same means. Of gVisor `make test` tries what is its own."""
    if runtime == "runc":
        return group_of(check) not in OF_THE_ENGINE
    return runtime == "crun" or group_of(check) not in OF_THE_RUNTIME


def _cases() -> list[object]:
    """Whatever the machine, these are the checks that fit."""
    cases: list[object] = []
    for runtime in RUNTIMES:
        engine = OciEngine(Settings(Path("/nonexistent/data"), Path("/nonexistent/run")), runtime)
        capabilities = asyncio.run(engine.describe()).capabilities
        for check in CHECKS:
            if check.unfit(capabilities) is None and check.name not in ONLY_FOR_OTHERS:
                marks = [pytest.mark.timeout(SLOW_S if check.slow else QUICK_S)]
                marks += [pytest.mark.slow] if check.slow else [pytest.mark.again] if _is_again(runtime, check) else []
                cases.append(pytest.param(runtime, check, id=f"{runtime}-{check.name}", marks=marks))
    return cases


@pytest.fixture(scope="module")
def benches() -> dict[str, RuntimeBench]:
    """One for each runtime, so that the pool is made once."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def _cleared(benches: dict[str, RuntimeBench]) -> Iterator[None]:
    yield
    left = []
    for bench in benches.values():
        asyncio.run(empty(OciEngine(bench.settings)))
        left += remains(bench.settings)
        shutil.rmtree(bench.settings.data_dir.parent, ignore_errors=True)
    assert left == []


@pytest.mark.parametrize(("runtime", "check"), _cases())
async def test_promise(runtime: str, check: Check, benches: dict[str, RuntimeBench], need_runtime: NeedRuntime) -> None:
    need_runtime(runtime)
    if runtime not in benches:
        folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))
        folder.chmod(0o755)
        benches[runtime] = RuntimeBench.of(Settings(folder / "data", folder / "run"), runtime)
    bench = benches[runtime]
    result = await run_one(bench, check)
    left = await bench.engine.list()
    for handle in left:  # the next check starts from nothing all the same
        await bench.engine.delete(handle)
    assert result.outcome is Outcome.KEPT, f"{check.promise}\n{result.outcome}: {result.reason}"
    assert left == []
