"""So much at once, so much per second in the long run."""

import pytest

from atoll.token_bucket import TokenBucket


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def test_a_full_bucket_gives_its_burst_and_then_its_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(2.0, 3.0, clock)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_s() == pytest.approx(0.5)
    clock.time += 0.5
    assert bucket.wait_s() == 0.0
    assert [bucket.take(), bucket.take()] == [True, False]
    assert not bucket.is_full()
    clock.time += 1000
    assert bucket.is_full()
    assert bucket.left == 3.0


def test_what_is_refused_takes_nothing() -> None:
    bucket = TokenBucket(1.0, 5.0, Clock())
    assert not bucket.take(6)
    assert bucket.take(5)


def test_of_many_as_many_are_granted_as_there_are() -> None:
    clock = Clock()
    bucket = TokenBucket(0.5, 4.0, clock)
    assert bucket.take_up_to(3) == 3
    assert bucket.take_up_to(3) == 1
    assert bucket.take_up_to(3) == 0
    clock.time += 3.0
    assert bucket.take_up_to(3) == 1
    assert bucket.left == pytest.approx(0.5)


def test_a_debt_is_waited_for() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 10.0, clock)
    bucket.overdraw(29)
    assert bucket.wait_s() == pytest.approx(2.0)
    clock.time += 2.0
    assert bucket.wait_s() == 0.0


def test_a_lower_limit_holds_at_once() -> None:
    clock = Clock()
    bucket = TokenBucket(100.0, 100.0, clock)
    bucket.limit(1.0, 2.0)
    assert bucket.left == 2.0
    bucket.take(2)
    clock.time += 1.0
    assert bucket.left == pytest.approx(1.0)


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    clock = Clock()
    bucket = TokenBucket(1.0, 2.0, clock)
    bucket.take()
    clock.time -= 50.0
    assert bucket.left == 1.0
    clock.time += 1.0
    assert bucket.left == 2.0
