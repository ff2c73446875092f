"""One change of a sandbox's life at a time, in all processes of an installation; and deletions win.

A sandbox has a directory of its own, its home, which is removed last when the sandbox is deleted. Every process that
creates, restarts, pauses, saves or deletes the sandbox holds a lock on that directory, which the kernel releases if the
holder dies. A deletion first leaves a mark in the home. From then on no other operation gets the lock, those that wait
for it give up, and the operation of the current holder is interrupted. The mark outlives its writer, so a deletion that
was killed is never taken for a living sandbox, and the next process completes it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.host.deadline import Deadline
from atoll.errors import EngineError, SandboxError, SandboxGoneError
from atoll.model import Cause

MARK = "deleting"
_RETRY_S = 0.01
_WAIT_S = 60.0
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Exclusion:
    home: Callable[[str], Path]
    """Returns the home directory of a sandbox."""
    lasting: bool = True
    """If False, a home exists only during operations on the sandbox: it is created and removed as needed."""

    @asynccontextmanager
    async def alone(self, sandbox_id: str, seconds: float = _WAIT_S) -> AsyncIterator[None]:
        """Hold off other changes of this sandbox. Raises SandboxGoneError if it is deleted before or meanwhile."""
        deadline = Deadline.after(seconds)

        async def wait() -> None:
            self.refuse_deleted(sandbox_id)
            if not deadline.left():
                raise EngineError(f"sandbox '{sandbox_id}' is busy with another change", hint="Try again later.")
            await asyncio.sleep(_RETRY_S)

        fd = await self._enter(sandbox_id, wait)
        if fd is None:
            raise deleted(sandbox_id)
        try:
            with self.explaining(sandbox_id):
                self.refuse_deleted(sandbox_id)
                yield
        finally:
            self._leave(sandbox_id, fd)

    @contextmanager
    def explaining(self, sandbox_id: str) -> Iterator[None]:
        """Turn errors into SandboxGoneError if the sandbox is being deleted or is already gone."""
        try:
            yield
        except SandboxGoneError:
            raise
        except (SandboxError, OSError) as error:
            gone = self.lasting and not self.home(sandbox_id).exists()
            if gone or self.is_being_deleted(sandbox_id):
                raise deleted(sandbox_id) from error
            raise

    @contextmanager
    def at_once(self, sandbox_id: str) -> Iterator[bool]:
        """Like `alone`, without waiting. Yields False if another change is in progress or the sandbox is gone."""
        fd = _open(self.home(sandbox_id))
        try:
            yield fd is not None and _lock(fd) and _is_at(fd, self.home(sandbox_id))
        finally:
            if fd is not None:
                os.close(fd)

    def is_busy(self, sandbox_id: str) -> bool:
        """Return whether a change of the sandbox is in progress."""
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
        """Hold the lock after all other changes were given up. Yields False if the sandbox was deleted meanwhile.

        `interrupt` is called repeatedly while another change is in progress. Raises EngineError at the deadline; the
        sandbox cannot be used even then.
        """
        home = self.home(sandbox_id)
        if self.lasting and not home.is_dir():  # only parts of it are left, and no change can be in progress
            yield True
            return

        async def wait() -> None:
            self._mark(home)
            if not deadline.left():
                raise EngineError(
                    f"sandbox '{sandbox_id}' is still busy with another change", hint="Delete it again later."
                )
            await interrupt()
            await asyncio.sleep(_RETRY_S)

        self._mark(home)
        fd = await self._enter(sandbox_id, wait)
        if fd is None:
            yield False
            return
        try:
            self._mark(home)
            yield True
            (home / MARK).unlink(missing_ok=True)
        finally:
            self._leave(sandbox_id, fd)

    async def _enter(self, sandbox_id: str, wait: Callable[[], Awaitable[None]]) -> int | None:
        """Wait for the lock and return its descriptor; None if the home is gone, and the sandbox with it."""
        home = self.home(sandbox_id)
        while True:
            if not self.lasting:
                home.mkdir(mode=0o700, exist_ok=True)
            fd = _open(home)
            if fd is None and self.lasting:
                return None
            if fd is None:
                continue
            try:
                while not _lock(fd):
                    await wait()
            except BaseException:
                os.close(fd)
                raise
            if _is_at(fd, home):
                return fd
            os.close(fd)
            if self.lasting:
                return None

    def _leave(self, sandbox_id: str, fd: int) -> None:
        if not self.lasting:
            with suppress(OSError):  # its deletion may have begun
                self.home(sandbox_id).rmdir()
        os.close(fd)

    def _mark(self, home: Path) -> None:
        with suppress(OSError):  # the home is gone or the disk is full; a deletion has to work then too
            os.close(os.open(home / MARK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def is_being_deleted(self, sandbox_id: str) -> bool:
        return os.path.lexists(self.home(sandbox_id) / MARK)

    def refuse_deleted(self, sandbox_id: str) -> None:
        if self.is_being_deleted(sandbox_id):
            raise deleted(sandbox_id)


def deleted(sandbox_id: str) -> SandboxGoneError:
    return SandboxGoneError(f"sandbox '{sandbox_id}' has been deleted", cause=Cause.USER.value)


def lock_new(home: Path) -> int | None:
    """Lock a home before it becomes visible to others. The caller closes the descriptor. None: another process holds
    the lock."""
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
    """Return whether this is still the directory of that name, and not one that was removed."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(home))
    except FileNotFoundError:
        return False
