"""The limits of a control group, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.model import Limits

CPU_PERIOD_US = 100_000
VIRTUAL_KERNEL_THREADS = 8192
"""The most threads of a sandbox with its own kernel: more than it needs, fewer than would harm the host."""


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    memory_bytes: int | None = None
    """Memory and swap together: no swap is allowed."""
    cpu_quota_us: int | None = None
    cpu_period_us: int = CPU_PERIOD_US
    pids: int | None = None
    cpu_weight: int | None = None
    """The share of processor time against sibling groups, on the scale of version 2: 100 is the default."""

    @classmethod
    def of(cls, limits: Limits) -> CgroupLimits:
        quota = None if limits.cpus is None else max(1000, math.ceil(limits.cpus * CPU_PERIOD_US))
        return cls(limits.memory_bytes, quota, pids=limits.pids)
