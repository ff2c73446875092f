"""Checks whether an engine keeps the promises of the conformance suite, one after another."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atoll.conformance.bench import Bench
from atoll.conformance.check import CHECKS, Check, SkippedError

_QUICK_S = 60.0
_SLOW_S = 600.0


class Outcome(enum.StrEnum):
    KEPT = "kept"
    BROKEN = "broken"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CheckResult:
    check: Check
    outcome: Outcome
    reason: str
    """What was seen instead of the promised behaviour, or why the check was skipped."""
    duration_s: float


async def run(
    bench: Bench,
    quick: bool,
    checks: Iterable[Check] = CHECKS,
    on_result: Callable[[CheckResult], None] | None = None,
    on_start: Callable[[Check], None] | None = None,
) -> list[CheckResult]:
    """Run all checks, or the quick ones. A broken promise is a result, and so is a check that raises or hangs."""
    results = []
    for check in checks:
        if quick and check.slow:
            continue
        if on_start is not None:
            on_start(check)
        result = await run_one(bench, check)
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results


async def run_one(bench: Bench, check: Check) -> CheckResult:
    started = time.monotonic()
    outcome, reason = await _judge(bench, check)
    return CheckResult(check, outcome, reason, time.monotonic() - started)


async def _judge(bench: Bench, check: Check) -> tuple[Outcome, str]:
    if unfit := check.unfit((await bench.engine.describe()).capabilities):
        return Outcome.SKIPPED, unfit
    limit_s = _SLOW_S if check.slow else _QUICK_S
    try:
        async with asyncio.timeout(limit_s) as deadline:
            await check.function(bench)
    except SkippedError as skipped:
        return Outcome.SKIPPED, str(skipped)
    except AssertionError as broken:
        return Outcome.BROKEN, str(broken)
    except Exception as error:
        if deadline.expired():
            return Outcome.BROKEN, f"it did not end within {limit_s:g} s"
        return Outcome.BROKEN, f"it ended with {type(error).__name__}: {error}"
    return Outcome.KEPT, ""
