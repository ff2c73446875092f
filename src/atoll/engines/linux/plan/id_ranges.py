"""Host ids for sandboxes: each gets a range of 65,536 that nobody else has, as long as it exists.

A range is claimed twice: for this installation on the machine (`claims.py`), so that no other installation has it, and
in the installation's own directory, as a symbolic link named after it that points to the sandbox's name and to no file.
Making either is one step that only one process can win, and a crash leaves either no link or one that names its owner,
which `owners` reports to whoever cleans up. Sandboxes of an earlier version have the second alone; the first is made up
for.

The ranges lie in 0x7000_0000 … 0x7FFF_FFFF. Distributions give ordinary users sub-ids from 100,000 and systemd gives
containers 0x0008_0000 … 0x6FFF_FFFF; above 0x7FFF_FFFF programs that take ids for signed numbers stumble.
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
"""No sandbox has this name."""
VOLUME_IDS = FIRST + COUNT * RANGE
"""The last range is nobody's: what the users of a sandbox other than root write to a volume belongs to it, so that
it is the same in every sandbox, and no process on this machine has these ids."""


@dataclass(frozen=True, slots=True)
class IdRanges:
    directory: Path
    machine: Claims | None = None
    """The claims of all installations on this machine. None: there are no others."""
    _own: dict[str, int] = field(default_factory=dict, compare=False)
    """What this process claimed, so that it need not be looked for among thousands."""

    def claim(self, owner: str) -> IdRange:
        """A range for this sandbox. Raises EngineError when all are taken."""
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
        """Only its owner's. May be repeated."""
        if self._owner(first) == owner:
            with suppress(FileNotFoundError):
                (self.directory / str(first)).unlink()
        if self.machine is not None:
            self.machine.release(str(first), owner)

    def release_all(self, owner: str) -> None:
        """As `release`, without knowing which. Looks first where `claim` did, so that others do not slow it down."""
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
        """Those of this installation, also where only one of the two claims was made."""
        machine = {int(name): owner for name, owner in self.machine.own().items()} if self.machine is not None else {}
        here = {first: self._owner(first) for first in self._claimed()}
        return machine | {first: owner for first, owner in here.items() if owner}

    def collect(self) -> list[str]:
        """Give back ranges of installations that are gone. Only if no process has one of their ids."""
        if self.machine is None:
            return []
        used = {(uid - FIRST) // RANGE for uid in uids_in_use()}
        return self.machine.collect(lambda name: (int(name) - FIRST) // RANGE in used)

    def _make_up(self) -> None:
        """For sandboxes of a version that knew no other installation."""
        if self.machine is None or _ALL in self._own:
            return
        for first in self._claimed():
            owner = self._owner(first)
            if owner:
                self.machine.take(str(first), owner)
                if self._owner(first) != owner:  # another process released it in between, and will not do so again
                    self.machine.release(str(first), owner)
        for name, owner in self.machine.own().items():
            if owner == _ALL:  # nobody's, and nobody would ever release it
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
    """Where a sandbox looks for its range first. Names are random: ids of one just deleted hardly come again soon."""
    return zlib.crc32(owner.encode()) % COUNT
