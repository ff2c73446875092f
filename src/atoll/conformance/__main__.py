"""`python -m atoll.conformance --engine bubblewrap`: measures one engine and says which promises it breaks."""

from __future__ import annotations

import argparse
import asyncio
import sys

from atoll.conformance import CHECKS, Check, CheckResult, Outcome, run
from atoll.conformance.installation import own_bench

_WORDS = {Outcome.KEPT: "ok", Outcome.BROKEN: "BROKEN", Outcome.SKIPPED: "skipped"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m atoll.conformance", description=__doc__)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--image", default="host")
    parser.add_argument("--slow", action="store_true", help="also the checks that take long")
    parser.add_argument("only", nargs="*", help="parts of the names of the checks to run")
    chosen = parser.parse_args()
    checks = [check for check in CHECKS if not chosen.only or any(part in check.name for part in chosen.only)]
    results = asyncio.run(_run(chosen.engine, chosen.image, not chosen.slow, checks))
    counts = {outcome: sum(result.outcome is outcome for result in results) for outcome in Outcome}
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts[Outcome.BROKEN] or not counts[Outcome.KEPT] else 0


async def _run(engine: str, image: str, quick: bool, checks: list[Check]) -> list[CheckResult]:
    async with own_bench(engine, image) as bench:
        return await run(bench, quick, checks, _show)


def _show(result: CheckResult) -> None:
    print(f"{_WORDS[result.outcome]:8} {result.duration_s:6.2f} s  {result.check.name}", flush=True)
    if result.reason:
        print(f"         {result.reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
