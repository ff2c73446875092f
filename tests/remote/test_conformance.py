"""The law, on sandboxes of a server: each check of the conformance suite is one test."""

from __future__ import annotations

import pytest

from atoll.conformance import CHECKS, Bench, Check, Outcome, run_one
from atoll.engines import registry
from atoll.settings import Settings
from needs import not_applicable
from promises import group_of, groups

INSIDE = groups("isolation", "process_trees", "shells", "special_files")
"""What the server's engine and its agent decide, whoever asks them."""


def as_parameter(check: Check) -> object:
    marks = [pytest.mark.timeout(900 if check.slow else 90)]
    marks += [pytest.mark.slow] if check.slow else [pytest.mark.again] if group_of(check) in INSIDE else []
    return pytest.param(check, id=check.name, marks=marks)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("check", [as_parameter(check) for check in CHECKS])
async def test_promise(check: Check, session_settings: Settings) -> None:
    engine = registry.remote(session_settings, None, None)
    try:
        result = await run_one(Bench(engine, session_settings), check)
        if result.outcome is Outcome.SKIPPED:
            not_applicable(result.reason)
        left = await engine.list()
        for handle in left:
            await engine.delete(handle)
        assert result.outcome is Outcome.KEPT, f"{check.promise}\n{result.reason}"
        assert left == []
    finally:
        await engine.aclose()
