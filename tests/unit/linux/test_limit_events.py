"""Which limit a failed command hit, from what was counted before and after it."""

from __future__ import annotations

import pytest

from atoll.engines.limit_events import LimitEvents
from atoll.model import Cause


@pytest.mark.parametrize(
    ("before", "after", "said", "cause"),
    [
        (LimitEvents(), LimitEvents(), "", None),
        (LimitEvents(oom_kills=1), LimitEvents(oom_kills=1), "Killed", None),
        (LimitEvents(oom_kills=1), LimitEvents(oom_kills=2), "", Cause.OUT_OF_MEMORY),
        (LimitEvents(), LimitEvents(oom_kills=1, pids_refused=9, disk_full=True), "", Cause.OUT_OF_MEMORY),
        (LimitEvents(pids_refused=3), LimitEvents(pids_refused=4, disk_full=True), "", Cause.PIDS),
        (LimitEvents(), LimitEvents(disk_full=True), "", Cause.DISK_FULL),
        (LimitEvents(disk_full=True), LimitEvents(disk_full=True), "no such file", None),
        (LimitEvents(disk_full=True), LimitEvents(disk_full=True), "cp: No space left on device", Cause.DISK_FULL),
        (LimitEvents(disk_full=True), LimitEvents(disk_full=True), "x: Disk quota exceeded\n", Cause.DISK_FULL),
        (LimitEvents(disk_full=True), LimitEvents(), "No space left on device", None),
    ],
)
def test_the_cause_is_the_limit_that_was_hit_since(
    before: LimitEvents, after: LimitEvents, said: str, cause: Cause | None
) -> None:
    assert after.cause_since(before, said) is cause
