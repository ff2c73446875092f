"""Processor time between accounts: the more an account has had lately, the less it weighs.

Weights of control groups share time exactly, and yet not promptly: beside twenty busy groups whose processes sleep and
wake all the time, a process of another group with the same weight waits up to a second for its turn. With twice their
weight it waits for some milliseconds. So an account loses weight as it uses the machine, down to a sixteenth, and gets
it back when it rests. Those who use as much as each other weigh the same, so nobody gets less than their share, and who
is alone has all of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from atoll.engines.host.cgroups.group_limits import CgroupLimits
from atoll.engines.host.cgroups.groups import Group, Hierarchy

_FREE = 0.1
"""The part of the machine that costs no weight."""
_LEAST = 1 / 16
_NEW = 0.5
"""How much the last look counts, against all before it. With a half, two that compete are even after one look."""
_CHANGE = 0.1
"""A weight that would change by less is left alone."""


class Balance:
    """The weights of the accounts of one installation. Not safe for several threads at once."""

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
        """When, and how many seconds of processor time by then."""
        self._used: dict[str, float] = {}
        """The part of the machine that each has had lately."""
        self._set: dict[str, int] = {}

    def look(self, paths: list[str]) -> None:
        """Measure the groups of all accounts, and weigh them. For every half second or so."""
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
            if before is None or used < before[1] or now <= before[0]:  # a new group, or a group that was made anew
                self._used[path] = 0.0
                self._set.pop(path, None)
                continue
            part = (used - before[1]) / (now - before[0]) / self._cpus
            self._used[path] = _NEW * part + (1 - _NEW) * self._used[path]
            self._weigh(group, weight_of(self._used[path], self._weight))

    def forget(self, path: str) -> None:
        """Somebody else has set the weight of this group."""
        self._set.pop(path, None)

    def _weigh(self, group: Group, weight: int) -> None:
        # Unknown: another process may have left it with any weight.
        current = self._set.get(group.path)
        if current is None or abs(weight - current) > current * _CHANGE or (weight == self._weight != current):
            with suppress(OSError):  # it is gone
                group.limit(CgroupLimits(cpu_weight=weight))
                self._set[group.path] = weight


def weight_of(used: float, full: int) -> int:
    """The weight of an account that has had this part of the machine lately. Pure."""
    return max(1, round(full * min(1.0, max(_LEAST, _FREE / used)))) if used > 0 else full
