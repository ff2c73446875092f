"""How often a sandbox hit its limits, and which of them made a command fail."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from atoll.model import Cause

_DISK_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


@dataclass(frozen=True, slots=True)
class LimitEvents:
    """How often a sandbox's limits were hit since it was made."""

    oom_kills: int = 0
    pids_refused: int = 0
    disk_full: bool = False
    """Whether the disk is full now. Unlike the other limits, the kernel does not count refused writes."""

    def cause_since(self, before: LimitEvents, said: str) -> Cause | None:
        """Return the limit that a failed command hit since `before`, if any.

        `said` is what the command wrote to stderr. A disk that was full before is the cause only if the command
        complains about it there.
        """
        if self.oom_kills > before.oom_kills:
            return Cause.OUT_OF_MEMORY
        if self.pids_refused > before.pids_refused:
            return Cause.PIDS
        if self.disk_full and (not before.disk_full or any(text in said for text in _DISK_FULL)):
            return Cause.DISK_FULL
        return None
