"""CPU time between accounts: the more an account has used lately, the less it weighs.

Weights of control groups share CPU time exactly, but not promptly. Beside twenty busy groups whose processes sleep and
wake all the time, a process of another group with the same weight waits up to a second for its turn; with twice their
weight it waits some milliseconds. So an account loses weight as it uses the machine, down to a sixteenth, and regains
it when it rests. Accounts that use equally much weigh the same, so none gets less than its share, and an account that
is alone gets all of the CPU time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from atoll.engines.host.cgroups.group_limits import CgroupLimits
from atoll.engines.host.cgroups.groups import Group
from atoll.engines.host.cgroups.hierarchy import Hierarchy

_FREE = 0.1
"""The fraction of the machine that an account may use without losing weight."""
_LEAST = 1 / 16
_NEW = 0.5
"""How much the latest measurement counts against all before it. With a half, two competing accounts are even after one
measurement."""
_CHANGE = 0.1
"""A weight that would change by a smaller fraction is left alone."""


class Balance:
    """The weights of the accounts of one installation. Not thread-safe."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        weight: int,
        cpus: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hierarchy, self._weight, self._clock = hierarchy, weight, clock
        self._cpus = cpus or len(os.sched_getaffinity(0))
        self._seen: dict[str, tuple[float, float]] = {}
        """The time of the last measurement, and the CPU seconds used until then."""
        self._used: dict[str, float] = {}
        """The fraction of the machine that each account has used lately."""
        self._set: dict[str, int] = {}

    def look(self, paths: list[str]) -> None:
        """Measure the groups of all accounts, and set their weights. To be called about twice a second."""
        for path in self._seen.keys() - set(paths):
            for table in (self._seen, self._used, self._set):
                table.pop(path, None)
        for path in paths:
            group = Group(self._hierarchy, path)
            now, used = self._clock(), group.cpu_s()
            if used is None:
                continue
            before = self._seen.get(path)
            self._seen[path] = (now, used)
            if before is None or used < before[1] or now <= before[0]:  # a new group, or one that was created again
                self._used[path] = 0.0
                self._set.pop(path, None)
                continue
            part = (used - before[1]) / (now - before[0]) / self._cpus
            self._used[path] = _NEW * part + (1 - _NEW) * self._used[path]
            self._weigh(group, weight_of(self._used[path], self._weight))

    def forget(self, path: str) -> None:
        """Forget the weight of this group, which something else has set."""
        self._set.pop(path, None)

    def _weigh(self, group: Group, weight: int) -> None:
        # None: another process may have left the group with any weight.
        current = self._set.get(group.path)
        if current is None or abs(weight - current) > current * _CHANGE or (weight == self._weight != current):
            with suppress(OSError):  # the group is gone
                group.limit(CgroupLimits(cpu_weight=weight))
                self._set[group.path] = weight


def weight_of(used: float, full: int) -> int:
    """Return the weight of an account that has used this fraction of the machine lately."""
    return max(1, round(full * min(1.0, max(_LEAST, _FREE / used)))) if used > 0 else full
