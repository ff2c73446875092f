"""One change of a sandbox's life at a time, in all processes of an installation; and deleting wins.

Theory of operation. A sandbox has a directory of its own, its home, which goes last when the sandbox is deleted.
Whoever makes, restarts, pauses, saves or deletes the sandbox holds a lock on that directory, which the kernel frees if
the holder dies. Whoever deletes the sandbox first leaves a mark in its home: from then on nobody else gets the lock,
those who wait for it give up, and what the holder is doing is interrupted. The mark outlives its writer, so a deletion
that was killed is never taken for a living sandbox, and whoever comes next completes it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.local.waiting import Deadline
from atoll.errors import EngineError, SandboxError, SandboxGoneError
from atoll.model import Cause

MARK = "deleting"
_RETRY_S = 0.01
_WAIT_S = 60.0
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Exclusion:
    home: Callable[[str], Path]
    """The directory of a sandbox."""

    @asynccontextmanager
    async def alone(self, sandbox_id: str, seconds: float = _WAIT_S) -> AsyncIterator[None]:
        """Nobody else changes this sandbox meanwhile. SandboxGoneError if it is deleted before or during that."""
        fd = _open(self.home(sandbox_id))
        if fd is None:
            raise deleted(sandbox_id)
        deadline = Deadline.after(seconds)
        try:
            while not _lock(fd):
                self.refuse_deleted(sandbox_id)
                if not deadline.left():
                    raise EngineError(f"sandbox '{sandbox_id}' is busy", hint="Try again when that is over.")
                await asyncio.sleep(_RETRY_S)
            if not _is_at(fd, self.home(sandbox_id)):
                raise deleted(sandbox_id)
            with self.explaining(sandbox_id):
                self.refuse_deleted(sandbox_id)
                yield
        finally:
            os.close(fd)

    @contextmanager
    def explaining(self, sandbox_id: str) -> Iterator[None]:
        """What fails because the sandbox is being deleted, or is gone already, says so."""
        try:
            yield
        except SandboxGoneError:
            raise
        except (SandboxError, OSError) as error:
            if not self.home(sandbox_id).exists() or self.is_being_deleted(sandbox_id):
                raise deleted(sandbox_id) from error
            raise

    @contextmanager
    def at_once(self, sandbox_id: str) -> Iterator[bool]:
        """As `alone`, without waiting. False: somebody else changes it, or it is gone."""
        fd = _open(self.home(sandbox_id))
        try:
            yield fd is not None and _lock(fd) and _is_at(fd, self.home(sandbox_id))
        finally:
            if fd is not None:
                os.close(fd)

    def is_busy(self, sandbox_id: str) -> bool:
        """Whether somebody changes it right now."""
        fd = _open(self.home(sandbox_id))
        if fd is None:
            return False
        try:
            return not _lock(fd)
        finally:
            os.close(fd)

    @asynccontextmanager
    async def deleting(
        self, sandbox_id: str, deadline: Deadline, interrupt: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[bool]:
        """Alone, after all others have given up. False: somebody else has deleted it meanwhile.

        `interrupt` is called again and again while somebody still changes the sandbox. Raises EngineError when the
        time is up; nobody can use the sandbox even then.
        """
        home = self.home(sandbox_id)
        fd = _open(home)
        if fd is None:  # only parts of it are left, which nobody can be at work on
            yield True
            return
        try:
            with suppress(OSError):  # it is gone, or the disk is full: deleting has to work then too
                os.close(os.open(home / MARK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            while not _lock(fd):
                if not deadline.left():
                    raise EngineError(f"sandbox '{sandbox_id}' is still busy", hint="Delete it again later.")
                await interrupt()
                await asyncio.sleep(_RETRY_S)
            yield _is_at(fd, home)
        finally:
            os.close(fd)

    def is_being_deleted(self, sandbox_id: str) -> bool:
        return os.path.lexists(self.home(sandbox_id) / MARK)

    def refuse_deleted(self, sandbox_id: str) -> None:
        if self.is_being_deleted(sandbox_id):
            raise deleted(sandbox_id)


def deleted(sandbox_id: str) -> SandboxGoneError:
    return SandboxGoneError(f"sandbox '{sandbox_id}' has been deleted", cause=Cause.USER.value)


def lock_new(home: Path) -> int | None:
    """Lock a home before anybody else can see it. To be closed by the caller. None: somebody else has it."""
    fd = os.open(home, _OPEN)
    if _lock(fd):
        return fd
    os.close(fd)
    return None


def _open(home: Path) -> int | None:
    try:
        return os.open(home, _OPEN)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, home: Path) -> bool:
    """Whether this is still the directory of that name, and not one that was removed."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(home))
    except FileNotFoundError:
        return False
