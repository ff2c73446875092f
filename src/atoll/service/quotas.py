"""How much a user may request, for one sandbox and for all sandboxes together.

Both are checked when a request arrives. The kernel enforces the limits of existing sandboxes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
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
_COUNTED = ("cpus", "memory_bytes", "pids", "disk_bytes")
"""The limits for which a user can have a quota."""


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
        most_memory = self._most.memory_bytes
        if asked.shm_bytes is not None and most_memory is not None and asked.shm_bytes > most_memory:
            raise ForbiddenError(
                f"only administrators may give a sandbox a /dev/shm of {asked.shm_bytes:g} bytes, which count as"
                f" memory: this server's maximum is {most_memory:g}",
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
        self._raising: dict[tuple[str, str], list[Limits]] = {}
        """Higher limits that are being set, by owner and sandbox."""
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
        there = self._granted(caller.user_id, records)
        with self._counted():
            _refuse_more_sandboxes(caller, len(there))
            _check(caller, there, limits, _COUNTED)
        self._pending[place] = limits
        try:
            yield
        finally:
            self._pending.pop(place, None)

    @contextmanager
    def raised(self, caller: Caller, record: Record, limits: Limits, records: list[Record]) -> Iterator[None]:
        """Reserve higher limits for a sandbox of the user while the block runs. Lower ones are always granted, also to
        a user who is above a quota. Raises LimitReachedError."""
        now = self._now(caller.user_id, record)
        more = [name for name in _COUNTED if (getattr(limits, name) or 0) > (getattr(now, name) or 0)]
        there = self._granted(caller.user_id, [each for each in records if each.id != record.id])
        with self._counted():
            _check(caller, there, limits, more)
        raising = self._raising.setdefault((caller.user_id, record.id), [])
        raising.append(limits)
        try:
            yield
        finally:
            raising.remove(limits)
            if not raising:
                self._raising.pop((caller.user_id, record.id), None)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except LimitReachedError:
            self.refused += 1
            raise

    def _granted(self, user_id: str, records: list[Record]) -> list[Limits]:
        """Return what the user has been granted: what these sandboxes have, and what is being made."""
        known = {record.key for record in records}
        waiting = [wanted for (user, key), wanted in self._pending.items() if user == user_id and key not in known]
        return [*(self._now(user_id, record) for record in records), *waiting]

    def _now(self, user_id: str, record: Record) -> Limits:
        """Return what counts for a sandbox: the highest of what it has and what it is about to have."""
        held = self._pending.get((user_id, record.key or "")) or _held(record)
        for more in self._raising.get((user_id, record.id), ()):
            higher = {
                name: value for name in _COUNTED if (value := getattr(more, name) or 0) > (getattr(held, name) or 0)
            }
            held = held.model_copy(update=higher)
        return held


def _held(record: Record) -> Limits:
    return effective_limits(record.spec, record.details).limits


def _refuse_more_sandboxes(caller: Caller, there: int) -> None:
    if caller.quotas.max_sandboxes is not None and there >= caller.quotas.max_sandboxes:
        raise LimitReachedError(
            f"user {caller.user_id!r} has {there} sandboxes, which is the limit", hint="Delete one first."
        )


def _check(caller: Caller, there: list[Limits], wanted: Limits, names: Collection[str]) -> None:
    """Raise LimitReachedError if the limits of these names would exceed a quota of the user."""
    for name in names:
        words, most, more = _NAMES[name], getattr(caller.quotas, f"max_{name}"), getattr(wanted, name)
        if most is None:
            continue
        if more is None:
            raise LimitReachedError(
                f"user {caller.user_id!r} has a quota of {most:g} {words}, so each sandbox must say how many it needs",
                hint="Add limits to the request, or use a spec that has them.",
            )
        if sum(getattr(limits, name) or 0 for limits in there) + more > most:
            raise LimitReachedError(
                f"user {caller.user_id!r} would have more than {most:g} {words}",
                hint="Delete a sandbox, or ask for less.",
            )
