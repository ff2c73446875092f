"""What is kept of output: all of it within the limit, its beginning and its end beyond."""

from __future__ import annotations

import random

import pytest

from atoll.guest.capture import Capture


def test_everything_within_the_limit_is_kept() -> None:
    capture = Capture(10)
    capture.add(memoryview(b"01234"))
    capture.add(memoryview(b"56789"))
    assert capture.value() == b"0123456789"
    assert (capture.total, capture.dropped, capture.truncated) == (10, 0, False)


def test_beyond_the_limit_both_ends_stay_and_the_gap_is_marked() -> None:
    capture = Capture(10)
    capture.add(memoryview(b"0123456789A"))
    assert capture.value() == b"01234\n... [1 bytes left out] ...\n6789A"
    assert capture.truncated


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 64])
def test_how_it_arrives_makes_no_difference(limit: int) -> None:
    source = random.Random(3)
    for _ in range(200):
        data = source.randbytes(source.randrange(300))
        whole, pieces = Capture(limit), Capture(limit)
        whole.add(memoryview(data))
        position = 0
        while position < len(data):
            size = source.randrange(1, 40)
            pieces.add(memoryview(data)[position : position + size])
            position += size
        assert pieces.value() == whole.value()
        assert pieces.total == len(data)
        assert pieces.dropped == max(0, len(data) - limit)


def test_a_flood_costs_no_more_than_twice_the_limit() -> None:
    capture = Capture(1000)
    for _ in range(10_000):
        capture.add(memoryview(bytes(700)))
    assert capture.kept <= 2000
    assert capture.dropped == 7_000_000 - 1000


def test_what_was_lost_before_is_counted_and_marked_at_the_beginning() -> None:
    capture = Capture(10)
    capture.miss(3)
    capture.add(memoryview(b"rest"))
    assert capture.value() == b"\n... [3 bytes left out] ...\nrest"
    assert (capture.total, capture.dropped) == (7, 3)
