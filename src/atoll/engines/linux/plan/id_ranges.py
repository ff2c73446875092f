"""Host ids for sandboxes. Each sandbox has an exclusive range of 65,536 ids while it exists.

A range is claimed twice: on the machine for this installation (`claims.py`), so that no other installation uses it, and
in the installation's own directory, by a symbolic link that is named after the range and points to the sandbox id, not
to a file. Either claim is made in one atomic step in which only one process can succeed. A crash leaves no link or one
that names its owner, which `owners` reports so that it can be cleaned up. Sandboxes of an earlier version have only the
second claim; the first one is added later.

The ranges are in 0x7000_0000 … 0x7FFF_FFFF. Distributions give ordinary users subordinate ids from 100,000, and systemd
gives containers 0x0008_0000 … 0x6FFF_FFFF. Above 0x7FFF_FFFF, programs fail that treat ids as signed numbers.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.claims import Claims, uids_in_use
from atoll.engines.linux.plan.sandbox_plan import RANGE, IdRange
from atoll.errors import EngineError

FIRST = 0x7000_0000
COUNT = 4095
_ALL = ""
"""A key that is not a sandbox id. In `_own` it marks that missing claims were added."""
VOLUME_IDS = FIRST + COUNT * RANGE
"""The last range is given to no sandbox. Files that users inside other than root write to a volume get ids of this
range, so that owners are the same in every sandbox, and no process on the machine has these ids."""


@dataclass(frozen=True, slots=True)
class IdRanges:
    directory: Path
    machine: Claims | None = None
    """The claims of all installations on this machine. None: there are no other installations."""
    _own: dict[str, int] = field(default_factory=dict, compare=False)
    """The ranges that this process claimed, so that it need not search for them among thousands."""

    def claim(self, owner: str) -> IdRange:
        """Claim a range for this sandbox. Raises EngineError if all are taken."""
        self._make_up()
        start = _start(owner)
        for attempt in range(2):
            for step in range(COUNT):
                first = FIRST + (start + step) % COUNT * RANGE
                if self._take(first, owner):
                    self._own[owner] = first
                    return IdRange(first)
            if attempt == 0 and not self.collect():
                break
        raise EngineError(
            f"all {COUNT} ranges of user ids are in use", hint="Delete sandboxes that are no longer needed."
        )

    def release(self, first: int, owner: str) -> None:
        """Release a range if it belongs to this owner. May be repeated."""
        if self._owner(first) == owner:
            with suppress(FileNotFoundError):
                (self.directory / str(first)).unlink()
        if self.machine is not None:
            self.machine.release(str(first), owner)

    def release_all(self, owner: str) -> None:
        """Release the range of this owner without knowing which one it is. The search starts where that of `claim`
        does, so that it is quick even if there are many ranges."""
        own = self._own.pop(owner, None)
        if own is not None and self._owner(own) == owner:
            self.release(own, owner)
            return
        start = FIRST + _start(owner) * RANGE
        for first in sorted(self._claimed(), key=lambda first: (first - start) % (COUNT * RANGE)):
            if self._owner(first) == owner:
                self.release(first, owner)
                return
        for name, claimed_for in self.machine.own().items() if self.machine is not None else ():
            if claimed_for == owner:
                self.release(int(name), owner)

    def owners(self) -> dict[int, str]:
        """Return the owners of this installation's ranges, also where only one of the two claims was made."""
        machine = {int(name): owner for name, owner in self.machine.own().items()} if self.machine is not None else {}
        here = {first: self._owner(first) for first in self._claimed()}
        return machine | {first: owner for first, owner in here.items() if owner}

    def collect(self) -> list[str]:
        """Release the ranges of installations that are gone, unless a process has one of their ids."""
        if self.machine is None:
            return []
        used = {(uid - FIRST) // RANGE for uid in uids_in_use()}
        return self.machine.collect(lambda name: (int(name) - FIRST) // RANGE in used)

    def _make_up(self) -> None:
        """Add the missing claims on the machine for sandboxes of an earlier version, which did not make them."""
        if self.machine is None or _ALL in self._own:
            return
        for first in self._claimed():
            owner = self._owner(first)
            if owner:
                self.machine.take(str(first), owner)
                if self._owner(first) != owner:  # another process has released the range, and will not do so again
                    self.machine.release(str(first), owner)
        for name, owner in self.machine.own().items():
            if owner == _ALL:  # it belongs to no sandbox, so it would never be released
                self.machine.release(name, owner)
        self._own[_ALL] = 0

    def _take(self, first: int, owner: str) -> bool:
        if self.machine is not None and not self.machine.take(str(first), owner):
            return False
        if self._take_here(first, owner):
            return True
        if self.machine is not None and self._owner(first) != owner:
            self.machine.release(str(first), owner)
        return False

    def _take_here(self, first: int, owner: str) -> bool:
        path = f"{self.directory}/{first}"
        try:
            os.symlink(owner, path)
        except FileExistsError:
            return False
        except FileNotFoundError:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._take_here(first, owner)
        return True

    def _claimed(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self.directory) if name.isdecimal()]
        except FileNotFoundError:
            return []

    def _owner(self, first: int) -> str | None:
        try:
            return os.readlink(self.directory / str(first))
        except FileNotFoundError:
            return None


def _start(owner: str) -> int:
    """Return the number of the range that is tried first for a sandbox. Sandbox ids are random, so the range of a
    deleted sandbox is hardly ever reused soon."""
    return zlib.crc32(owner.encode()) % COUNT
