"""A lock on the control groups that all sandboxes of an installation share.

An OCI runtime creates a sandbox's group step by step, in one hierarchy after the other, and needs the groups above it
all the time. These are removed when no sandbox is in them, which another process may find to be so between two of these
steps. So every start of a sandbox claims the shared groups until the sandbox's own group exists, and every removal
first makes sure that they are unclaimed. Claims are file locks, which the kernel releases if their holder dies.

A removal that finds the groups claimed leaves them to the claimant, which removes them after its own sandbox. Removals
take turns: the previous one may have looked while the last sandbox of the next was still there.
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

from atoll.engines.host.deadline import Deadline
from atoll.errors import EngineError
from atoll.settings import Settings

_RETRY_S = 0.002
_TURN_S = 2.0
"""Maximum time to wait for a turn. A removal takes milliseconds; one that hangs is not waited for."""


@dataclass(frozen=True, slots=True)
class GroupLock:
    path: Path

    @classmethod
    def of(cls, settings: Settings) -> GroupLock:
        """Return the lock of an installation. The sandboxes of all its engines are in the same groups."""
        return cls(settings.data_dir / "oci" / "groups.lock")

    @asynccontextmanager
    async def claimed(self, deadline: Deadline) -> AsyncIterator[None]:
        """Keep the shared groups from being removed. Raises EngineError if a removal takes too long."""
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
        """Keep sandboxes from being started. Yields False if one is being started, which does not wait for this lock.

        May block for a moment, while another process removes groups.
        """
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
