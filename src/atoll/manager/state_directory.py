"""The directory that a manager owns while it runs, with a lock, the manager's id and its journal."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from atoll import durable
from atoll.errors import EngineUnavailableError, StateError, StateInUseError
from atoll.settings import owned_directory

_TRIES, _RETRY_S = 10, 0.01


class StateDirectory:
    """A directory that only one manager at a time can open, in any process. The kernel releases the lock when that
    process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def open(self) -> str:
        """Lock the directory and return the manager's id, which is the same every time. Raises StateError."""
        try:
            owned_directory(self.path, 0o700)
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, EngineUnavailableError) as error:
            raise StateError(f"the state directory cannot be used: {error}") from error
        try:
            _lock(fd)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise StateInUseError(
                f"another manager (process {holder or 'unknown'}) uses '{self.path}'",
                hint="Stop it, or give this one a state_dir of its own.",
            ) from error
        self._lock = fd
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return self._name()
        except OSError as error:
            self.close()
            raise StateError(f"the state directory '{self.path}' cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Release the lock. May be repeated."""
        fd, self._lock = self._lock, None
        if fd is not None:
            os.close(fd)

    def _name(self) -> str:
        """Return the manager's id. It is not in the journal, because it identifies the manager's sandboxes if the
        journal is lost."""
        path = self.path / "manager-id"
        with suppress(FileNotFoundError):
            if name := path.read_text().strip():
                return name
        name = uuid4().hex
        durable.write(path, name, 0o644, sync=True)
        return name


def _lock(fd: int) -> None:
    """Lock the file. Raises BlockingIOError if another manager holds the lock.

    The lock is tried several times, because a child process that is being started also holds a copy of the descriptor
    for a moment.
    """
    for tries_left in range(_TRIES - 1, -1, -1):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not tries_left:
                raise
        time.sleep(_RETRY_S)
