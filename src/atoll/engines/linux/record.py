"""What is written down about a sandbox, so that another process of ours finds it again.

The record is written before anything is made, completed when the sandbox runs, and removed last. All else that a
sandbox has is found by its name: its control group, its layer, its range of ids, its directory for run-time files.
"""

from __future__ import annotations

import errno
import math
import os
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from atoll import durable
from atoll.engines.enforcement import limit_details
from atoll.engines.host import exclusion
from atoll.engines.host.sandbox_record import RECORD_FILE, RecordDirectory, SandboxRecord, is_sandbox_id
from atoll.errors import EngineError, SpecError
from atoll.model import EffectiveLimits, SandboxSpec

_POSITION = "position"
_SMALLEST_LAYER_BYTES = 64 << 10


class Base(BaseModel):
    """What lies below the writable layer. Without it a saved state means nothing."""

    model_config = ConfigDict(frozen=True)
    image: str
    digest: str = ""
    """Empty for `host`, which is always there."""
    env: dict[str, str] = Field(default_factory=dict)
    """The image's own."""


class Record(SandboxRecord):
    """Complete once it has `init`, unless it is `half_made`."""

    runtime: str
    """The launcher that starts it, by name."""
    expires_at: float | None = None
    left_out: tuple[str, ...] = ()
    """The names of defaults that could not be enforced."""
    account: str | None = None
    """Whose control group its own is in. None: it was made before there were any, directly in the installation's."""
    expires_now: float | None = None
    """The same moment on the clock that does not jump; it means something only within `boot_id`."""
    half_made: bool = False
    """There is a first process, but it is not sure that it ever became the agent."""
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

    def limit_details(self) -> dict[str, str]:
        """As its handle carries them; nothing for one that was made before there were defaults."""
        return limit_details(EffectiveLimits(self.defaults, self.left_out)) if self.account is not None else {}

    def limited_spec(self) -> SandboxSpec:
        return self.spec.model_copy(update={"limits": self.limits})

    def layer_limit_bytes(self, elsewhere: int = 0) -> int | None:
        """What its files may take. `elsewhere`: what else is counted as its disk."""
        wanted = self.limits.disk_bytes
        return None if wanted is None else max(_SMALLEST_LAYER_BYTES, wanted - self.origin_bytes - elsewhere)

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


class Records(RecordDirectory):
    """One directory for each sandbox, with the record in it, and a link that names its latest checkpoint."""

    def begin(self, record: Record) -> int:
        """The record appears as a whole, with its directory, whose lock is the caller's: closing the returned
        descriptor frees it. Raises SpecError if there is a sandbox of that name."""
        home = self.home(record.sandbox_id)
        draft = Path(durable.draft_path(home))
        lock: int | None = None
        try:
            _make_directory(draft)
            lock = exclusion.lock_new(draft)
            assert lock is not None  # nobody else knows its name
            durable.write_new(draft / RECORD_FILE, record.model_dump_json())
            draft.rename(home)
        except OSError as error:
            if lock is not None:
                os.close(lock)
            _empty(draft)
            if home.is_dir():
                raise SpecError(f"there is already a sandbox '{record.sandbox_id}'") from None
            raise EngineError(f"the sandbox's record could not be written: {error}") from error
        return lock

    def go_to(self, sandbox_id: str, position: str | None) -> None:
        """Note the checkpoint that it goes on from. A link, because to replace a file waits for the disk, and this may
        be done before every command."""
        path = self.home(sandbox_id) / _POSITION
        if position is None:
            path.unlink(missing_ok=True)
            return
        with durable.draft(path) as draft:
            draft.symlink_to(position)

    def position(self, record: Record) -> str | None:
        try:
            return os.readlink(self.home(record.sandbox_id) / _POSITION)
        except OSError:
            return record.position

    def read(self, sandbox_id: str) -> Record | None:
        """None when there is none, or none that can be understood."""
        return self.read_as(Record, sandbox_id)

    def exists(self, sandbox_id: str) -> bool:
        return self.home(sandbox_id).is_dir() or sandbox_id in self._abandoned()

    def forget(self, sandbox_id: str) -> None:
        for draft in self._abandoned().get(sandbox_id, ()):
            _empty(draft)
        _empty(self.home(sandbox_id))

    def sweep(self) -> None:
        """Remove drafts whose writer is dead."""
        durable.remove_abandoned(self.directory, _empty)

    def ids(self) -> list[str]:
        try:
            complete = {name for name in os.listdir(self.directory) if is_sandbox_id(name)}
        except FileNotFoundError:
            return []
        return sorted(complete | self._abandoned().keys())

    def _abandoned(self) -> dict[str, list[Path]]:
        """Drafts whose writer died: all that there is of a sandbox that was killed in its first moment."""
        found: dict[str, list[Path]] = {}
        for each in durable.abandoned(self.directory):
            if is_sandbox_id(each.name):
                found.setdefault(each.name, []).append(each.path)
        return found


def _make_directory(path: Path) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)  # it lists the sandboxes


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
