"""The law, on the `native` engine: each check of the conformance suite is one test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.conformance import CHECKS, Bench, Check, Outcome, run_one
from atoll.engines.linux.native_engine import NativeEngine
from atoll.settings import Settings
from needs import need, not_applicable


@pytest.fixture(scope="session")
def bench(session_folder: Path, need_engine: Callable[[str, Settings], None]) -> Bench:
    settings = Settings(session_folder / "n" / "data", session_folder / "n" / "run")
    need_engine("native", settings)
    need("mkfs.btrfs", "nft")  # without them it declares less, and less is checked
    return Bench(NativeEngine(settings), settings)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(
            check,
            id=check.name,
            marks=[pytest.mark.timeout(900), pytest.mark.slow] if check.slow else [pytest.mark.timeout(90)],
        )
        for check in CHECKS
    ],
)
async def test_promise(bench: Bench, check: Check) -> None:
    result = await run_one(bench, check)
    if result.outcome is Outcome.SKIPPED:
        not_applicable(result.reason)
    left = await bench.engine.list()
    for handle in left:
        await bench.engine.delete(handle)
    await bench.engine.aclose()
    assert result.outcome is Outcome.KEPT, f"{check.promise}\n{result.reason}"
    assert left == []
