from __future__ import annotations

import math
import os
import time

import pytest

from atoll.engines.host.process_ref import ProcessRef, boot_id
from atoll.engines.linux.linux_record import Record
from atoll.model import SandboxSpec


def record(boot: str, *, expires_at: float | None = None, expires_now: float | None = None) -> Record:
    creator = ProcessRef.of(os.getpid())
    assert creator is not None
    return Record(
        sandbox_id="a",
        spec=SandboxSpec(),
        runtime="native",
        created_at=0,
        boot_id=boot,
        creator=creator,
        expires_at=expires_at,
        expires_now=expires_now,
    )


def test_a_wall_clock_that_is_set_changes_no_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    made = record(boot_id(), expires_at=time.time() + 100, expires_now=now + 100)
    for jump in (10**6, -(10**6)):
        monkeypatch.setattr(time, "time", lambda jump=jump: 1.7e9 + jump)
        assert 90 < made.left_s() <= 100


def test_after_a_restart_of_the_machine_the_wall_clock_decides() -> None:
    assert record("another", expires_at=time.time() - 1, expires_now=10**9).left_s() < 0
    assert record("another", expires_at=time.time() + 50).left_s() > 40
    assert record("another").left_s() == math.inf
