"""The records of saved states.

    saved/<id>.json         a saved state, to which the subvolume of that name in the storage pool belongs
    saved/<id>.users/       a file for each sandbox that started from the state and may go back to it, and a file
                            `.<process>` for each process that is making such sandboxes
    saved/.<id>.<process>   a draft of a state that the process is making; if the process is dead, it was never made

A process is written as its id and its start time, because in a container a restarted server may have the same id.

The record appears last and is removed first, so every listed state is complete. A state that is deleted while sandboxes
still need it becomes an origin, which is not listed and is removed with the last of them. `gc` removes subvolumes and
image leases without a record.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from atoll.engines.host.process_ref import ProcessRef, this_process
from atoll.engines.host.saved_states import StateRecord
from atoll.engines.linux.linux_record import Base
from atoll.errors import SpecError
from atoll.model.checkpoint import Checkpoint, Snapshot

_ID = re.compile(r"[0-9a-f]{24}")
_PROCESS = re.compile(r"[0-9]{1,10}(-[0-9]{1,20})?")
_USERS = ".users"
VERSION_NOTE = "version"
"""The file beside the memory files that names the version of the program that saved them. Earlier versions of Atoll
wrote none."""
LEASE = "saved-"
"""The prefix of the names of image leases that saved states hold."""


class SavedState(StateRecord):
    version: Literal[1] = 1
    kind: Literal["checkpoint", "snapshot", "origin", "step", "ready"]
    """An `origin` is kept only for the sandboxes that started from it. A `step` belongs to the cache of builds, and
    `ready` is the memory of a sandbox that was ready; the name of both is their key."""
    base: Base
    memory: bool = False
    runtime: str = ""
    """The launcher that saved the memory. Others cannot restore it."""
    memory_bytes: int = 0
    own_bytes: int = 0
    """What a step wrote beyond the state that it started from."""
    stubs: tuple[str, ...] = ()
    """Paths of a step that may exist only because something was mounted there."""

    def as_checkpoint(self) -> Checkpoint:
        return Checkpoint(
            self.id,
            self.sandbox_id,
            self.name,
            self.created_at,
            self.parent,
            self.made_by,
            self.size_bytes,
            self.memory,
        )

    def as_snapshot(self) -> Snapshot:
        size_bytes = self.size_bytes + self.memory_bytes
        base = self.base
        return Snapshot(self.name, self.created_at, base.image, base.digest, size_bytes, self.source, self.memory)


@dataclass(frozen=True, slots=True)
class SavedStates:
    directory: Path

    def new_id(self) -> str:
        """Return a new id, and write a draft of this process for it, so that the unfinished state is not removed as a
        leftover."""
        saved_id = os.urandom(12).hex()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._draft(saved_id).touch(0o600)
        return saved_id

    def write(self, saved: SavedState) -> None:
        draft = self._draft(saved.id)
        draft.write_text(saved.model_dump_json())
        draft.rename(self._path(saved.id))

    def abandon(self, saved_id: str) -> None:
        self._draft(saved_id).unlink(missing_ok=True)

    def read(self, saved_id: str) -> SavedState | None:
        try:
            return SavedState.model_validate_json(self._path(saved_id).read_bytes())
        except (OSError, ValidationError):
            return None

    def hold(self, saved_id: str) -> None:
        """Mark a state that is about to be written as in use by this process, which will make sandboxes from it. Call
        `release` afterwards."""
        users = self._users(saved_id)
        users.mkdir(mode=0o700)
        (users / f".{_ourselves()}").touch(0o600)

    def release(self, saved_id: str) -> bool:
        return self.leave(saved_id, f".{_ourselves()}")

    def use(self, saved_id: str, sandbox_id: str) -> bool:
        """Keep a state for a sandbox, even if the state is deleted. Returns False if it is gone already."""
        with self.locked():
            if not self._path(saved_id).exists():
                return False
            users = self._users(saved_id)
            users.mkdir(mode=0o700, exist_ok=True)
            (users / sandbox_id).touch(0o600)
            return True

    def is_used(self, saved_id: str) -> bool:
        """Return whether there are sandboxes, or processes making some, that use the state."""
        try:
            return bool(os.listdir(self._users(saved_id)))
        except FileNotFoundError:
            return False

    def used_by(self, sandbox_id: str) -> list[str]:
        names = (name.removesuffix(_USERS) for name in self._names() if name.endswith(_USERS))
        return [saved_id for saved_id in names if (self._users(saved_id) / sandbox_id).exists()]

    def unused(self, lives: Callable[[str], bool]) -> Iterator[str]:
        """Drop users that are gone, both sandboxes and processes. Yield the ids of states that are no longer needed and
        whose records were removed."""
        names = (name.removesuffix(_USERS) for name in self._names() if name.endswith(_USERS))
        held = {name for name in names if _ID.fullmatch(name)}
        # An origin without users was being removed by a process that died.
        for saved_id in held | {saved.id for saved in self.all() if saved.kind == "origin"}:
            if self._is_being_made(saved_id):
                continue
            users: list[str] = []
            with contextlib.suppress(FileNotFoundError):
                users = os.listdir(self._users(saved_id))
            gone = [user for user in users if not _lives(user, lives)]
            if any([self.leave(saved_id, user) for user in gone] or [self.leave(saved_id, None)]):
                yield saved_id

    def leave(self, saved_id: str, user: str | None) -> bool:
        """Remove a user of a state. Returns True if the state is not needed any more and its record was removed."""
        with self.locked():
            if user is not None:
                (self._users(saved_id) / user).unlink(missing_ok=True)
            saved = self.read(saved_id)
            if saved is not None and saved.kind != "origin":
                return False
            return self._forget_unused(saved_id)

    def forget(self, saved_id: str) -> bool:
        """Remove the record of a state. Returns False if sandboxes still need the state; it is then only no longer
        listed."""
        with self.locked():
            if self._forget_unused(saved_id):
                return True
            saved = self.read(saved_id)
            if saved is not None and saved.kind != "origin":
                self.write(saved.model_copy(update={"kind": "origin", "sandbox_id": "", "name": ""}))
            return False

    def _forget_unused(self, saved_id: str) -> bool:
        try:
            self._users(saved_id).rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return False
        self._path(saved_id).unlink(missing_ok=True)
        return True

    def used_at(self, saved_id: str) -> float:
        """Return when the state was written, or noted as used. 0 if there is none."""
        try:
            return self._path(saved_id).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def note_use(self, saved_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._path(saved_id))

    def of(self, sandbox_id: str) -> list[SavedState]:
        return [saved for saved in self.all() if saved.sandbox_id == sandbox_id]

    def snapshot(self, name: str) -> SavedState | None:
        found = [saved for saved in self.all() if saved.kind == "snapshot" and saved.name == name]
        return found[-1] if found else None

    def all(self) -> list[SavedState]:
        """Return all saved states, oldest first."""
        found = [self.read(name.removesuffix(".json")) for name in self._names() if name.endswith(".json")]
        return sorted((saved for saved in found if saved is not None), key=lambda saved: (saved.created_at, saved.id))

    def is_known(self, saved_id: str) -> bool:
        """Return whether the state exists or is being made. The draft is checked first, because it may become a state
        in between."""
        return bool(_ID.fullmatch(saved_id)) and (self._is_being_made(saved_id) or self._path(saved_id).exists())

    def _is_being_made(self, saved_id: str) -> bool:
        drafts = (_draft_of(path.name) for path in self.directory.glob(f".{saved_id}.*"))
        return any(draft is not None and _is_alive(draft[1]) for draft in drafts)

    def sweep(self) -> None:
        for name in self._names():
            if (draft := _draft_of(name)) is not None and not _is_alive(draft[1]):
                (self.directory / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock that makes looking at users and acting on the result one step. Hold it only briefly."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.directory)
        except FileNotFoundError:
            return []

    def _path(self, saved_id: str) -> Path:
        if not _ID.fullmatch(saved_id):
            raise SpecError(f"{saved_id[:80]!r} is not the id of a checkpoint")
        return self.directory / f"{saved_id}.json"

    def _users(self, saved_id: str) -> Path:
        return self._path(saved_id).with_suffix(_USERS)

    def _draft(self, saved_id: str) -> Path:
        return self.directory / f".{saved_id}.{_ourselves()}"


def _ourselves() -> str:
    me = this_process()
    return f"{me.pid}-{me.started}"


def _is_alive(process: str) -> bool:
    pid, dash, started = process.partition("-")
    if not dash:  # written by an earlier version
        return ProcessRef.of(int(pid)) is not None
    return ProcessRef(int(pid), int(started)).is_alive()


def _lives(user: str, lives: Callable[[str], bool]) -> bool:
    if user.startswith("."):
        return bool(_PROCESS.fullmatch(user[1:])) and _is_alive(user[1:])
    return lives(user)


def _draft_of(name: str) -> tuple[str, str] | None:
    """Return the state id and the process of a draft, or None if `name` is not the name of a draft."""
    saved_id, _, writer = name.removeprefix(".").rpartition(".")
    if name.startswith(".") and _ID.fullmatch(saved_id) and _PROCESS.fullmatch(writer):
        return saved_id, writer
    return None
