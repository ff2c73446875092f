"""Host ids for sandboxes: each gets a range of 65,536 that nobody else has, as long as it exists.

A claimed range is a symbolic link named after it that points to the sandbox's name and to no file. Making one is one
step that only one process can win, so two never get the same range, and a crash leaves either no link or one that
names its owner, which `owners` reports to whoever cleans up.

The ranges lie in 0x7000_0000 … 0x7FFF_FFFF. Distributions give ordinary users sub-ids from 100,000 and systemd gives
containers 0x0008_0000 … 0x6FFF_FFFF; above 0x7FFF_FFFF programs that take ids for signed numbers stumble.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.engines.linux.plan import RANGE, IdRange
from atoll.errors import EngineError

FIRST = 0x7000_0000
COUNT = 4095
VOLUME_IDS = FIRST + COUNT * RANGE
"""The last range is nobody's: what the users of a sandbox other than root write to a volume belongs to it, so that
it is the same in every sandbox, and no process on this machine has these ids."""


@dataclass(frozen=True, slots=True)
class IdRanges:
    directory: Path
    _own: dict[str, int] = field(default_factory=dict, compare=False)
    """What this process claimed, so that it need not be looked for among thousands."""

    def claim(self, owner: str) -> IdRange:
        """A range for this sandbox. Raises EngineError when all are taken."""
        start = _start(owner)
        for step in range(COUNT):
            first = FIRST + (start + step) % COUNT * RANGE
            if self._take(first, owner):
                self._own[owner] = first
                return IdRange(first)
        raise EngineError(
            f"all {COUNT} ranges of user ids are in use", hint="Delete sandboxes that are no longer needed."
        )

    def release(self, first: int, owner: str) -> None:
        """Only its owner's. May be repeated."""
        if self._owner(first) == owner:
            with suppress(FileNotFoundError):
                (self.directory / str(first)).unlink()

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

    def owners(self) -> dict[int, str]:
        return {first: self._owner(first) or "" for first in self._claimed()}

    def _take(self, first: int, owner: str) -> bool:
        path = f"{self.directory}/{first}"
        try:
            os.symlink(owner, path)
        except FileExistsError:
            return False
        except FileNotFoundError:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._take(first, owner)
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
