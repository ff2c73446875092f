"""The records of sandboxes that are trees of processes, and the removal of their directories."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from atoll.engines.enforcement import limit_details
from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.host.sandbox_record import RECORD_FILE, RecordDirectory, SandboxRecord, is_sandbox_id
from atoll.model import EffectiveLimits
from atoll.removal import remove_tree


class Record(SandboxRecord):
    engine: str
    installation: str
    left_out: tuple[str, ...] | None = None
    """The names of defaults that could not be enforced. None: the sandbox was made before there were any."""
    uid: int | None = None
    """The user id on this machine that belongs to this sandbox alone."""
    monitor: ProcessRef | None = None
    """The process that Atoll started."""

    def limit_details(self) -> dict[str, str]:
        """Return the default limits as the details of a handle carry them."""
        return {} if self.left_out is None else limit_details(EffectiveLimits(self.defaults, self.left_out))

    def is_over_age(self) -> bool:
        """Whether its lifetime is over. It begins with the first process inside."""
        return (
            self.spec.limits.lifetime_s is not None
            and self.init is not None
            and self.is_of_this_boot()
            and self.init.age_s() >= self.spec.limits.lifetime_s
        )

    def processes(self) -> set[ProcessRef]:
        """Return the processes that may be running: the first one inside, with which all others inside end, and the one
        outside."""
        if not self.is_of_this_boot():
            return set()
        return {process for process in (self.init, self.monitor) if process is not None}


class Records(RecordDirectory):
    """The records of one engine."""

    def read(self, sandbox_id: str) -> Record | None:
        return self.read_as(Record, sandbox_id)

    def exists(self, sandbox_id: str) -> bool:
        return self.home(sandbox_id).is_dir()

    def ids(self) -> list[str]:
        try:
            with os.scandir(self.directory) as entries:
                return sorted(
                    entry.name for entry in entries if is_sandbox_id(entry.name) and entry.is_dir(follow_symlinks=False)
                )
        except FileNotFoundError:
            return []

    def remove(self, sandbox_id: str) -> None:
        """Remove the sandbox's directory. Several callers may try at once, in other processes too. Raises OSError."""
        home = self.home(sandbox_id)
        try:
            fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # The lock's last holder may have removed the directory, and a new sandbox may have one of the same name.
            if not home.exists() or not os.path.samestat(os.fstat(fd), os.stat(home)):
                return
            for path in self.parts(sandbox_id):
                remove_tree(path)
            os.rmdir(home)
        finally:
            os.close(fd)

    def parts(self, sandbox_id: str) -> list[Path]:
        """Return what has to be removed, the record last: until then the sandbox is still found."""
        try:
            paths = [self.home(sandbox_id) / name for name in os.listdir(self.home(sandbox_id))]
        except FileNotFoundError:
            return []
        return sorted(paths, key=lambda path: path.name == RECORD_FILE)
