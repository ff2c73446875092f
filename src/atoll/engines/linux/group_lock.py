"""Who needs the control groups that all sandboxes of an installation share.

A runtime makes a sandbox's group step by step in one hierarchy after the other, and needs the groups above it all the
while. These go when no sandbox is in them, which another process may find to be so between two of these steps. So
whoever starts a sandbox claims them until its own group is there, and whoever removes them first makes sure that
nobody does. Claims are locks, which the kernel frees if their holder dies.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.local.waiting import Deadline
from atoll.errors import EngineError

_RETRY_S = 0.002


@dataclass(frozen=True, slots=True)
class GroupLock:
    path: Path

    @asynccontextmanager
    async def claimed(self, deadline: Deadline) -> AsyncIterator[None]:
        """Nobody removes a group that sandboxes share meanwhile."""
        fd = self._open()
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
        """Nobody starts a sandbox meanwhile. False: somebody does, and does not wait for us."""
        if not self.path.parent.is_dir():
            yield True
            return
        fd = self._open()
        try:
            yield _lock(fd, fcntl.LOCK_EX)
        finally:
            os.close(fd)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            self.path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
