"""What waits in memory is counted for each account, and given back."""

from __future__ import annotations

import pytest

from atoll import buffers
from atoll.buffers import Budgets
from atoll.errors import SandboxResourceError
from atoll.guest.capture import Capture

MIB = 1 << 20


def test_one_account_holds_no_more_than_its_budget() -> None:
    budgets = Budgets(10 * MIB, 100 * MIB)
    first, second = budgets.open("mallory"), budgets.open("mallory")
    assert first.take(8 * MIB) == 8 * MIB
    assert second.take(8 * MIB) == 2 * MIB
    assert budgets.open("ann").take(8 * MIB) == 8 * MIB
    first.close()
    first.close()
    assert second.take(8 * MIB) == 8 * MIB
    assert first.take(1) == 0
    second.close()
    assert budgets.held_by("mallory") == 0


def test_everybody_gets_a_little_however_much_others_hold() -> None:
    budgets = Budgets(10 * MIB, 10 * MIB)
    assert budgets.open("mallory").take(10 * MIB) == 10 * MIB
    assert budgets.open("ann").take(10 * MIB) == 2 * MIB


def test_an_output_without_room_is_cut_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = Budgets(5000, 1 << 30)
    token = buffers.reservation.set(budgets.open("mallory"))
    try:
        captures = [Capture(4000), Capture(4000)]
        for capture in captures:
            for number in range(100):
                capture.add(memoryview(b"%099d\n" % number))
        first, second = captures
        assert first.value().startswith(b"0" * 98)
        assert first.value().endswith(b"99\n")
        assert len(second.value()) < 1100
        assert second.truncated
        assert second.dropped == 10_000 - 1000
        assert b"bytes left out" in second.value()
        with pytest.raises(SandboxResourceError):
            buffers.need(1)
    finally:
        buffers.reservation.reset(token)
    buffers.need(1 << 40)  # nobody counts
