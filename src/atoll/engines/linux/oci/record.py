"""What is written down about a sandbox, so that another process of ours finds it again.

The record is written before anything is made, completed when the sandbox runs, and removed last. All else that a
sandbox has is found by its name: its control group, its layer, its range of ids, its directory for run-time files.
"""

from __future__ import annotations

import errno
import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from atoll.engines.base import limit_details
from atoll.engines.linux.oci.saved import Base
from atoll.engines.local import exclusion
from atoll.engines.local.processes import ProcessRef, boot_id
from atoll.errors import EngineError, SpecError
from atoll.model import Cause, EffectiveLimits, Limits, SandboxSpec

_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_FILE = "record.json"
_POSITION = "position"


class Ended(BaseModel):
    """Why a sandbox is dead. Kept, because nobody can find it out a second time."""

    model_config = ConfigDict(frozen=True)
    cause: Cause
    reason: str


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)
    version: Literal[1] = 1
    sandbox_id: str
    spec: SandboxSpec
    runtime: str
    created_at: float
    expires_at: float | None = None
    defaults: Limits = Limits()
    """What the engine gave where the spec has no limit."""
    left_out: tuple[str, ...] = ()
    """The names of defaults that could not be enforced."""
    account: str | None = None
    """Whose control group its own is in. None: it was made before there were any, directly in the installation's."""
    expires_now: float | None = None
    """The same moment on the clock that does not jump; it means something only within `boot_id`."""
    boot_id: str
    creator: ProcessRef
    """Our process that makes it: as long as it lives, an incomplete record means that it is still at work."""
    init: ProcessRef | None = None
    """The sandbox's first process. None: not complete."""
    half_made: bool = False
    """There is a first process, but it is not sure that it ever became the agent."""
    ended: Ended | None = None
    base: Base | None = None
    """What its layer stands on, if that is not simply the spec's image."""
    origin: str | None = None
    """The saved state that it began with. None: an empty layer."""
    inherited_bytes: int = 0
    """What its layer took over from a saved state, which the layer's own quota does not count."""
    origin_bytes: int = 0
    """What it took over from somebody else's state when it was made, which its account does not count."""
    position: str | None = None
    """The checkpoint that it went back to last; `Records.position` knows where it is since."""
    memory: str | None = None
    """The saved state whose processes it goes on with when it is started."""
    asleep: bool = False
    """Its memory is on the disk, under its own name: nothing of it runs until it is resumed."""
    restoring: str | None = None
    """The saved state that it is going back to (empty: an empty layer), until it runs again."""

    @property
    def limits(self) -> Limits:
        """Those that hold."""
        return self.spec.limits.over(self.defaults)

    def limit_details(self) -> dict[str, str]:
        """As its handle carries them; nothing for one that was made before there were defaults."""
        return limit_details(EffectiveLimits(self.defaults, self.left_out)) if self.account is not None else {}

    def limited_spec(self) -> SandboxSpec:
        return self.spec.model_copy(update={"limits": self.limits})

    def is_of_this_boot(self) -> bool:
        return self.boot_id == boot_id()

    def left_s(self) -> float:
        """How much longer it may live."""
        if self.expires_now is not None and self.is_of_this_boot():
            return self.expires_now - time.clock_gettime(time.CLOCK_BOOTTIME)
        return math.inf if self.expires_at is None else self.expires_at - time.time()

    def is_alive(self) -> bool:
        return self.ended is None and self.init is not None and self.is_of_this_boot() and self.init.is_alive()

    def is_being_made(self) -> bool:
        return (
            self.ended is None
            and not self.asleep
            and self.is_incomplete()
            and self.is_of_this_boot()
            and self.creator.is_alive()
        )

    def is_incomplete(self) -> bool:
        return self.init is None or self.half_made

    def was_never_made(self) -> bool:
        """Whoever was making it died before it ran for the first time."""
        return self.is_incomplete() and self.restoring is None and not self.asleep and not self.is_being_made()


@dataclass(frozen=True, slots=True)
class Records:
    """One directory for each sandbox, with the record in it, and a link that names its latest checkpoint."""

    directory: Path

    def home(self, sandbox_id: str) -> Path:
        if not _ID.fullmatch(sandbox_id):
            raise SpecError(
                f"{sandbox_id[:80]!r} cannot be the name of a sandbox",
                hint="Use up to 40 lower-case letters, digits, '-' and '_', beginning with a letter or digit.",
            )
        return self.directory / sandbox_id

    def begin(self, record: Record) -> int:
        """The record appears as a whole, with its directory, whose lock is the caller's: closing the returned
        descriptor frees it. Raises SpecError if there is a sandbox of that name."""
        home = self.home(record.sandbox_id)
        draft = self.directory / f".{record.sandbox_id}.{os.getpid()}"
        lock: int | None = None
        try:
            _make_directory(draft)
            if (lock := exclusion.lock_new(draft)) is None:  # another task of ours makes one of that name
                raise SpecError(f"there is already a sandbox '{record.sandbox_id}'")
            # Nobody looks into a draft, so the file need not appear as a whole.
            _write_file(f"{draft}/{_FILE}", record)
            draft.rename(home)
        except OSError as error:
            if lock is not None:
                os.close(lock)
            _empty(draft)
            if home.is_dir():
                raise SpecError(f"there is already a sandbox '{record.sandbox_id}'") from None
            raise EngineError(f"the sandbox's record could not be written: {error}") from error
        return lock

    def write(self, record: Record) -> None:
        """Replace it as a whole. Raises FileNotFoundError when the sandbox was deleted meanwhile."""
        self._write(self.home(record.sandbox_id), record)

    @staticmethod
    def _write(home: Path, record: Record) -> None:
        draft = f"{home}/.{_FILE}.{os.getpid()}"
        _write_file(draft, record)
        os.replace(draft, f"{home}/{_FILE}")

    def go_to(self, sandbox_id: str, position: str | None) -> None:
        """Note the checkpoint that it goes on from. A link, because to replace a file waits for the disk, and this may
        be done before every command."""
        path = self.home(sandbox_id) / _POSITION
        if position is None:
            path.unlink(missing_ok=True)
            return
        draft = path.with_name(f".{_POSITION}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        draft.symlink_to(position)
        draft.replace(path)

    def position(self, record: Record) -> str | None:
        try:
            return os.readlink(self.home(record.sandbox_id) / _POSITION)
        except OSError:
            return record.position

    def read(self, sandbox_id: str) -> Record | None:
        """None when there is none, or none that can be understood."""
        try:
            return Record.model_validate_json((self.home(sandbox_id) / _FILE).read_bytes())
        except (OSError, ValidationError):
            return None

    def exists(self, sandbox_id: str) -> bool:
        return self.home(sandbox_id).is_dir() or sandbox_id in self._abandoned()

    def forget(self, sandbox_id: str) -> None:
        for draft in self._abandoned().get(sandbox_id, ()):
            _empty(draft)
        _empty(self.home(sandbox_id))

    def sweep(self) -> None:
        """Remove drafts whose writer is dead."""
        for draft in self.directory.glob(".*.*"):
            writer = draft.name.rpartition(".")[2]
            if writer.isdecimal() and ProcessRef.of(int(writer)) is None:
                _empty(draft)

    def ids(self) -> list[str]:
        try:
            complete = {name for name in os.listdir(self.directory) if _ID.fullmatch(name)}
        except FileNotFoundError:
            return []
        return sorted(complete | self._abandoned().keys())

    def _abandoned(self) -> dict[str, list[Path]]:
        """Drafts whose writer died: all that there is of a sandbox that was killed in its first moment."""
        found: dict[str, list[Path]] = {}
        try:
            drafts = [name for name in os.listdir(self.directory) if name.startswith(".")]
        except FileNotFoundError:
            return found
        for name in drafts:
            sandbox_id, _, writer = name[1:].rpartition(".")
            if _ID.fullmatch(sandbox_id) and writer.isdecimal() and ProcessRef.of(int(writer)) is None:
                found.setdefault(sandbox_id, []).append(self.directory / name)
        return found


def _make_directory(path: Path) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)  # it lists the sandboxes
    except FileExistsError:  # of a process that was killed and had our number
        pass


def _write_file(path: str, record: Record) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        content = memoryview(record.model_dump_json().encode())
        while content:
            content = content[os.write(fd, content) :]
    finally:
        os.close(fd)


def _empty(home: Path) -> None:
    for tries_left in range(8, -1, -1):
        try:
            # The mark of its deletion goes last: what is left of it is never taken for a sandbox.
            for name in sorted(os.listdir(home), key=lambda name: name == exclusion.MARK):
                (home / name).unlink(missing_ok=True)
            home.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            # Somebody who looked at it just now has written its end down in there.
            if error.errno != errno.ENOTEMPTY or not tries_left:
                raise
