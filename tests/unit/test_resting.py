"""Threads that compute rest while other accounts are active."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from atoll import workers
from atoll.engines.host.line_diff import unified_diff
from atoll.workers import Cancellation, WorkCancelledError, account

PATIENCE_S = 30


def compute(cancellation: Cancellation, enough: Callable[[], bool]) -> None:
    until = time.thread_time() + 0.05
    while time.thread_time() < until and not enough():
        cancellation.check()


def as_account(who: str, work: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        account.set(who)
        work()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(("who", "crowded", "rests"), [("ann", True, True), ("ann", False, False), ("", True, False)])
def test_work_rests_only_beside_others(monkeypatch: pytest.MonkeyPatch, who: str, crowded: bool, rests: bool) -> None:
    monkeypatch.setattr(workers, "others_are_active", lambda _: crowded)
    cancellation = Cancellation()
    as_account(who, lambda: compute(cancellation, lambda: cancellation.rested_s > 0)).join(PATIENCE_S)
    assert (cancellation.rested_s > 0) is rests


def test_a_rest_ends_when_nobody_waits_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    resting, ended = threading.Event(), threading.Event()

    def others_are_active(_: str) -> bool:
        resting.set()
        return True

    monkeypatch.setattr(workers, "others_are_active", others_are_active)
    monkeypatch.setattr(workers, "_MAX_REST_S", 1000.0)
    monkeypatch.setattr(workers, "_REST", 1e6)
    cancellation = Cancellation()

    def work() -> None:
        with pytest.raises(WorkCancelledError):
            compute(cancellation, lambda: False)
        ended.set()

    thread = as_account("ann", work)
    assert resting.wait(PATIENCE_S)
    cancellation.cancel()
    thread.join(PATIENCE_S)
    assert ended.is_set()


def test_rests_are_not_counted_as_time_of_the_work() -> None:
    cancellation = Cancellation()
    cancellation.rested_s = 1000.0
    assert cancellation.elapsed_s < 0


def test_a_comparison_of_one_text_looks_at_its_cancellation_again_and_again() -> None:
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1

    old, new = [f"{number % 3}\n" for number in range(500)], [f"{number % 2}\n" for number in range(500)]
    unified_diff(old, new, "x", check)
    assert looks > 100
