"""Who needs the control groups that all sandboxes of an installation share.

A runtime makes a sandbox's group step by step in one hierarchy after the other, and needs the groups above it all the
while. These go when no sandbox is in them, which another process may find to be so between two of these steps. So
whoever starts a sandbox claims them until its own group is there, and whoever removes them first makes sure that
nobody does. Claims are locks, which the kernel frees if their holder dies.

Whoever finds them claimed leaves them to the claimant, who removes them after its own sandbox. Those who remove them
take turns: the one before may have looked while the last sandbox of the other was still there.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import EngineError
from atoll.settings import Settings
from atoll.waiting import Deadline

_RETRY_S = 0.002
_TURN_S = 2.0
"""A removal takes milliseconds; one that hangs is not waited for."""


@dataclass(frozen=True, slots=True)
class GroupLock:
    path: Path

    @classmethod
    def of(cls, settings: Settings) -> GroupLock:
        """All engines of an installation have their sandboxes in the same groups."""
        return cls(settings.data_dir / "oci" / "groups.lock")

    @asynccontextmanager
    async def claimed(self, deadline: Deadline) -> AsyncIterator[None]:
        """Nobody removes a group that sandboxes share meanwhile."""
        fd = _open(self.path)
        try:
            while not _lock(fd, fcntl.LOCK_SH):
                if not deadline.left():
                    raise EngineError("another process has been removing shared control groups for too long")
                await asyncio.sleep(_RETRY_S)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def unclaimed(self) -> Iterator[bool]:
        """Nobody starts a sandbox meanwhile. False: somebody does, and does not wait for us. May block for a moment,
        while others remove groups."""
        if not self.path.parent.is_dir():
            yield True
            return
        turn = _open(self.path.with_suffix(".turn"))
        try:
            deadline = Deadline.after(_TURN_S)
            while not _lock(turn, fcntl.LOCK_EX) and deadline.left():
                time.sleep(_RETRY_S)
            fd = _open(self.path)
            try:
                yield _lock(fd, fcntl.LOCK_EX)
            finally:
                os.close(fd)
        finally:
            os.close(turn)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
