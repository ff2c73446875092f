"""The limits of a control group, as data and as what is written into its files."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.engines.host.cgroups.hierarchy import Mode
from atoll.model import Limits

CPU_PERIOD_US = 100_000
MEMORY_AND_SWAP = "memory.memsw.limit_in_bytes"
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


def settings(mode: Mode, limits: CgroupLimits) -> list[tuple[str, str, str]]:
    """Return controller, file and value, in the order of writing (on v1 memory comes before memory and swap)."""
    found: list[tuple[str, str, str]] = []
    if mode == "v2":
        if limits.memory_bytes is not None:
            found += [("memory", "memory.max", str(limits.memory_bytes)), ("memory", "memory.swap.max", "0")]
        if limits.cpu_quota_us is not None:
            found.append(("cpu", "cpu.max", f"{limits.cpu_quota_us} {limits.cpu_period_us}"))
        if limits.cpu_weight is not None:
            found.append(("cpu", "cpu.weight", str(limits.cpu_weight)))
    else:
        if limits.memory_bytes is not None:
            found += [
                ("memory", "memory.limit_in_bytes", str(limits.memory_bytes)),
                ("memory", MEMORY_AND_SWAP, str(limits.memory_bytes)),
            ]
        if limits.cpu_quota_us is not None:
            found += [
                ("cpu", "cpu.cfs_period_us", str(limits.cpu_period_us)),
                ("cpu", "cpu.cfs_quota_us", str(limits.cpu_quota_us)),
            ]
        if limits.cpu_weight is not None:
            found.append(("cpu", "cpu.shares", str(max(2, limits.cpu_weight * 1024 // 100))))
    if limits.pids is not None:
        found.append(("pids", "pids.max", str(limits.pids)))
    return found


def changes(mode: Mode, before: CgroupLimits, after: CgroupLimits) -> list[tuple[str, str, str]]:
    """Return what to write into a group with the limits `before`, so that it has `after`. None lifts a limit.

    On v1 the limit of memory and swap together can never be lower than that of memory alone, which decides the order.
    """
    found: list[tuple[str, str, str]] = []
    if after.memory_bytes != before.memory_bytes:
        found += _memory_changes(mode, before.memory_bytes, after.memory_bytes)
    if after.cpu_quota_us != before.cpu_quota_us:
        quota = after.cpu_quota_us
        if mode == "v2":
            found.append(("cpu", "cpu.max", f"{'max' if quota is None else quota} {after.cpu_period_us}"))
        else:
            found.append(("cpu", "cpu.cfs_period_us", str(after.cpu_period_us)))
            found.append(("cpu", "cpu.cfs_quota_us", str(-1 if quota is None else quota)))
    if after.pids != before.pids:
        found.append(("pids", "pids.max", "max" if after.pids is None else str(after.pids)))
    return found


def _memory_changes(mode: Mode, before: int | None, after: int | None) -> list[tuple[str, str, str]]:
    if mode == "v2":
        value, swap = ("max", "max") if after is None else (str(after), "0")
        return [("memory", "memory.max", value), ("memory", "memory.swap.max", swap)]
    value = str(-1 if after is None else after)
    files = [("memory", MEMORY_AND_SWAP, value), ("memory", "memory.limit_in_bytes", value)]
    grows = before is not None and (after is None or after > before)
    return files if grows else files[::-1]
