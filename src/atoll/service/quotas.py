"""How much a user may request, for one sandbox and for all sandboxes together.

Both are checked when a request arrives. The kernel enforces the limits of existing sandboxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from atoll.manager import LimitReachedError, Record
from atoll.model import Limits, effective_limits
from atoll.service.caller import Caller
from atoll.service.failures import ForbiddenError

_NAMES = {
    "memory_bytes": "bytes of memory",
    "cpus": "CPUs",
    "pids": "processes",
    "disk_bytes": "bytes of disk",
    "open_files": "open files",
}


class LimitCeilings:
    """The maximum limits that users who are not administrators may request for one sandbox."""

    def __init__(self, most: Limits) -> None:
        self._most = most

    def check(self, caller: Caller, asked: Limits) -> None:
        """Raise ForbiddenError for a limit above the maximum."""
        if caller.is_admin:
            return
        for name, words in _NAMES.items():
            value, most = getattr(asked, name), getattr(self._most, name)
            if value is not None and most is not None and value > most:
                raise ForbiddenError(
                    f"only administrators may give a sandbox {value:g} {words}: this server's maximum is {most:g}",
                    hint="Ask for less, or leave it out to get the default.",
                )

    def applied(self, caller: Caller, asked: Limits, defaults: Limits) -> Limits:
        """Return the requested limits. Where a default is above the maximum, the maximum is added."""
        if caller.is_admin:
            return asked
        lower = {
            name: most
            for name in _NAMES
            if getattr(asked, name) is None
            and (most := getattr(self._most, name)) is not None
            and (getattr(defaults, name) or 0) > most
        }
        return asked.model_copy(update=lower) if lower else asked


class Reservations:
    """Grants that are not in the manager's records yet, by owner and idempotency key.

    Every creation has a key. The reservation counts until the creation is over, and from then on the record with the
    same key does. Nothing is awaited between checking and granting. A limit that was not requested counts with the
    default that applies.
    """

    def __init__(self) -> None:
        self._pending: dict[tuple[str, str], Limits] = {}
        self.refused = 0
        """How many requests were refused because of a quota."""

    @contextmanager
    def reserve(self, caller: Caller, key: str, limits: Limits, records: list[Record]) -> Iterator[None]:
        """Reserve limits while the block runs. `limits` are those that will apply, `records` are the user's present
        records. Raises LimitReachedError."""
        place = (caller.user_id, key)
        if any(record.key == key for record in records) or place in self._pending:
            yield  # a repeated request, which was granted
            return
        known = {record.key for record in records}
        waiting = [wanted for (user, other), wanted in self._pending.items() if user == place[0] and other not in known]
        there = [self._pending.get((place[0], record.key or "")) or _held(record) for record in records]
        try:
            _check(caller, [*there, *waiting], limits)
        except LimitReachedError:
            self.refused += 1
            raise
        self._pending[place] = limits
        try:
            yield
        finally:
            self._pending.pop(place, None)


def _held(record: Record) -> Limits:
    return effective_limits(record.spec, record.details).limits


def _check(caller: Caller, there: list[Limits], wanted: Limits) -> None:
    quotas = caller.quotas
    if quotas.max_sandboxes is not None and len(there) >= quotas.max_sandboxes:
        raise LimitReachedError(
            f"user {caller.user_id!r} has {len(there)} sandboxes, which is the limit", hint="Delete one first."
        )
    for what, most, values, more in (
        ("CPUs", quotas.max_cpus, [limits.cpus for limits in there], wanted.cpus),
        ("bytes of memory", quotas.max_memory_bytes, [limits.memory_bytes for limits in there], wanted.memory_bytes),
        ("processes", quotas.max_pids, [limits.pids for limits in there], wanted.pids),
        ("bytes of disk", quotas.max_disk_bytes, [limits.disk_bytes for limits in there], wanted.disk_bytes),
    ):
        if most is None:
            continue
        if more is None:
            raise LimitReachedError(
                f"user {caller.user_id!r} has a quota of {most:g} {what}, so each sandbox must say how many it needs",
                hint="Add limits to the request, or use a spec that has them.",
            )
        if sum(value or 0 for value in values) + more > most:
            raise LimitReachedError(
                f"user {caller.user_id!r} would have more than {most:g} {what}",
                hint="Delete a sandbox, or ask for less.",
            )
