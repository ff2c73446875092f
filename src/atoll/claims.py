"""Claims on resources that only one installation on this machine may use at a time, such as a range of host ids.

A claim is a symbolic link in a directory that only root can access. Its name is that of the resource. Its target
records the installation's directory (by device, inode and birth time, so that a copy or a recreated directory is a
different one), the PID namespace in which it was made, the owner, and the path of the directory. Creating a link is
atomic, so only one process can succeed. The directory is below `/run`, so a restart of the machine removes all claims.

Installations that are deleted leave claims behind. Such a claim is removed only if it is old, its directory is gone, it
was made in the current PID namespace (so that its processes would be visible), and none of its processes is left. A
lock ensures that a claim is not removed twice.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.settings import owned_directory

MACHINE = Path("/run/atoll-claims")
_YOUNG_S = 600.0
"""A claim younger than this is kept, because the claimed resource may not be in use yet."""
_AT_FDCWD, _STATX_BTIME, _STATX_BYTES = -100, 0x800, 256
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Claim:
    home_id: str
    pid_namespace: str
    owner: str
    home: str

    @property
    def text(self) -> str:
        return f"{self.home_id} {self.pid_namespace} {self.owner} {self.home}"

    @classmethod
    def parse(cls, text: str) -> Claim | None:
        parts = text.split(" ", 3)
        return cls(*parts) if len(parts) == 4 else None

    def is_deserted(self) -> bool:
        """Return whether the installation's directory is gone or was recreated."""
        return identity(Path(self.home)) != self.home_id


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of one kind, from the point of view of the installation with the directory `home`."""

    kind: str
    home: Path
    machine: Path | None = None
    """The directory of all claims. None means the default directory."""

    @property
    def directory(self) -> Path:
        return (self.machine or MACHINE) / self.kind

    def take(self, name: str, owner: str) -> bool:
        """Claim a resource. Returns False if another installation, or another owner in this one, has claimed it."""
        made = Claim(identity(self.home) or "", _pid_namespace(), owner, str(self.home))
        try:
            os.symlink(made.text, self.directory / name)
            return True
        except FileExistsError:
            found = self.find(name)
            return found is not None and (found.home_id, found.owner) == (made.home_id, owner)
        except FileNotFoundError:
            owned_directory(self.machine or MACHINE, 0o700)
            owned_directory(self.directory, 0o700)
            return self.take(name, owner)

    def take_over(self, name: str, owner: str) -> Claim | None:
        """Claim a resource, even if a deleted installation has a claim on it.

        Returns None on success, otherwise the existing claim.
        """
        if self.take(name, owner):
            return None
        with self._alone():
            found = self.find(name)
            if found is not None and found.is_deserted():
                (self.directory / name).unlink(missing_ok=True)
        return None if self.take(name, owner) else self.find(name)

    def release(self, name: str, owner: str) -> None:
        """Release a claim if this installation made it for that owner. May be repeated, also concurrently."""
        if not self._is_ours(name, owner):
            return
        with self._alone():
            # Another process may have released it meanwhile, and another installation may have claimed it.
            if self._is_ours(name, owner):
                (self.directory / name).unlink(missing_ok=True)

    def _is_ours(self, name: str, owner: str) -> bool:
        found = self.find(name)
        return found is not None and found.owner == owner and found.home_id == identity(self.home)

    def own(self) -> dict[str, str]:
        """Return the claims of this installation with their owners."""
        mine = identity(self.home)
        return {name: claim.owner for name, claim in self._all() if claim.home_id == mine}

    def find(self, name: str) -> Claim | None:
        try:
            return Claim.parse(os.readlink(self.directory / name))
        except OSError:
            return None

    def collect(self, used: Callable[[str], bool]) -> list[str]:
        """Remove claims of deleted installations and return their names. `used` tells whether a resource is in use."""
        removed = []
        with self._alone():
            for name, claim in self._all():
                if not (claim.is_deserted() and claim.pid_namespace == _pid_namespace() and self._is_old(name)):
                    continue
                if not used(name):
                    (self.directory / name).unlink(missing_ok=True)
                    removed.append(name)
        return removed

    def _all(self) -> Iterator[tuple[str, Claim]]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return
        for name in names:
            claim = self.find(name)
            if claim is not None:
                yield name, claim

    def _is_old(self, name: str) -> bool:
        try:
            return time.time() - os.lstat(self.directory / name).st_mtime > _YOUNG_S
        except FileNotFoundError:
            return False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        owned_directory(self.machine or MACHINE, 0o700)
        owned_directory(self.directory, 0o700)
        with open(self.directory / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def identity(directory: Path) -> str | None:
    """Return a text that identifies a directory on this machine, or None if it does not exist."""
    try:
        found = os.stat(directory)
    except OSError:
        return None
    return f"{found.st_dev}:{found.st_ino}:{_birth(directory)}"


def _birth(directory: Path) -> str:
    """Return the birth time of a directory, or "" if it is unknown. The inode alone does not identify a directory,
    because file systems reuse the inodes of removed ones."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(_AT_FDCWD, os.fsencode(directory), 0, _STATX_BTIME, found) != 0:
        return ""
    mask, seconds, nanoseconds = struct.unpack_from("=I76xqI", found)
    return f"{seconds}.{nanoseconds:09}" if mask & _STATX_BTIME else ""


def uids_in_use() -> set[int]:
    """Return the user ids of all visible processes."""
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError, ValueError):
                for line in Path("/proc", name, "status").read_text(errors="replace").splitlines():
                    if line.startswith("Uid:"):
                        found.update(map(int, line.split()[1:]))
    return found


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid").removeprefix("pid:")
