"""What a control group bounds, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.model import Limits

CPU_PERIOD_US = 100_000
VIRTUAL_KERNEL_THREADS = 8192
"""The threads of a kernel of its own: more than any sane sandbox needs, fewer than would take the host down."""


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    memory_bytes: int | None = None
    """Memory and swap together: swap is closed."""
    cpu_quota_us: int | None = None
    cpu_period_us: int = CPU_PERIOD_US
    pids: int | None = None
    cpu_weight: int | None = None
    """Against its siblings, as v2 counts: 100 is the usual one."""

    @classmethod
    def of(cls, limits: Limits) -> CgroupLimits:
        quota = None if limits.cpus is None else max(1000, math.ceil(limits.cpus * CPU_PERIOD_US))
        return cls(limits.memory_bytes, quota, pids=limits.pids)
