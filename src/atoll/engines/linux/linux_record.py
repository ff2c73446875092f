"""The record of a sandbox, by which other processes of the installation find it.

The record is written before anything is made, completed when the sandbox runs, and removed last. Everything else that
belongs to a sandbox is found by its id: its control group, its layer, its range of ids and its run directory.
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
from atoll.images import Image
from atoll.model import EffectiveLimits, ImageDefaults, Limits, SandboxSpec
from atoll.model.handle import IMAGE, PREWARMED

_POSITION = "position"
_SMALLEST_LAYER_BYTES = 64 << 10


class Base(BaseModel):
    """The image below a writable layer. A saved state holds only the differences from it."""

    model_config = ConfigDict(frozen=True)
    image: str
    digest: str = ""
    """Empty for the image `host`, which always exists."""
    env: dict[str, str] = Field(default_factory=dict)
    """The environment variables of the image."""
    defaults: ImageDefaults = ImageDefaults()
    """What else the image says about sandboxes made from it. Earlier versions did not keep it."""

    @classmethod
    def of(cls, image: Image, name: str) -> Base:
        """Return the base of a sandbox that was made from this image under this name."""
        config = image.config
        defaults = ImageDefaults(
            digest=image.digest, user=config.user, work_dir=config.work_dir, entrypoint=config.entrypoint,
            cmd=config.cmd, exposed_ports=config.exposed_ports, labels=config.labels,
        )  # fmt: skip
        return cls(image=name, digest=image.digest, env=config.env, defaults=defaults.shortened())


class Record(SandboxRecord):
    """The record of a sandbox of a Linux engine. It is complete once `init` is set, unless `half_made` is."""

    runtime: str
    """The name of the launcher that starts the sandbox."""
    expires_at: float | None = None
    left_out: tuple[str, ...] = ()
    """The names of the default limits that could not be enforced."""
    account: str | None = None
    """The account in whose control group the sandbox's own is. None: an earlier version made the sandbox, directly in
    the group of the installation."""
    expires_now: float | None = None
    """The same moment as `expires_at` on CLOCK_BOOTTIME, which never jumps but is valid only within the boot
    `boot_id`."""
    half_made: bool = False
    """There is a first process, but it may never have become the agent."""
    base: Base | None = None
    """The image below the layer. None: it is `host`, or an earlier version made the sandbox."""
    origin: str | None = None
    """The saved state that the sandbox started from. None: an empty layer."""
    inherited_bytes: int = 0
    """The bytes that the layer inherited from a saved state, which the layer's own quota does not count."""
    origin_bytes: int = 0
    """The bytes that the sandbox inherited from the state of another one when it was made. Its storage account does not
    count them."""
    position: str | None = None
    """The checkpoint of the last rollback. `Records.position` returns the present position."""
    memory: str | None = None
    """The saved state whose processes continue when the sandbox is started."""
    ready_key: str = ""
    """What names the memory that may be kept of the sandbox once it is ready. Empty: none may be kept."""
    prewarmed: bool = False
    """The sandbox started from the memory of one that was ready, which is its origin."""
    asleep: bool = False
    """The sandbox is hibernated: its memory is on disk under its own id, and nothing of it runs until it is resumed."""
    restoring: str | None = None
    """The saved state of a rollback in progress (an empty string stands for an empty layer). It is set until the
    sandbox runs again."""

    limits_before: Limits | None = None
    """The requested limits before a change that is in progress. None: those of `spec` are in force."""

    def limit_details(self) -> dict[str, str]:
        """Return the limits as details of a handle. They are empty for sandboxes that were made before there were
        default limits."""
        return limit_details(EffectiveLimits(self.defaults, self.left_out)) if self.account is not None else {}

    def image_details(self) -> dict[str, str]:
        """Return what the image says about the sandbox, as details of a handle."""
        return {} if self.base is None or not self.base.digest else {IMAGE: self.base.defaults.model_dump_json()}

    def prewarm_details(self) -> dict[str, str]:
        """Return the ready state that the sandbox started from, as details of a handle."""
        return {PREWARMED: self.origin} if self.prewarmed and self.origin is not None else {}

    def limited_spec(self) -> SandboxSpec:
        return self.spec.model_copy(update={"limits": self.limits})

    def layer_limit_bytes(self, elsewhere: int = 0) -> int | None:
        """Return the limit of the sandbox's files, or None if its disk is not limited. `elsewhere` is the number of
        other bytes that count against the disk limit."""
        wanted = self.limits.disk_bytes
        return None if wanted is None else max(_SMALLEST_LAYER_BYTES, wanted - self.origin_bytes - elsewhere)

    def left_s(self) -> float:
        """Return the rest of the sandbox's lifetime in seconds."""
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
        """Return whether the process that was making the sandbox died before the sandbox ran."""
        return self.is_incomplete() and self.restoring is None and not self.asleep and not self.is_being_made()


class Records(RecordDirectory):
    """The records of an installation. Each sandbox has a directory with its record and a symbolic link that names its
    latest checkpoint."""

    def begin(self, record: Record) -> int:
        """Write the record of a new sandbox, and lock the sandbox for the caller.

        The directory appears complete with the record in it. Closing the returned descriptor releases the lock. Raises
        SpecError if there is a sandbox of that id, and EngineError if the record cannot be written.
        """
        home = self.home(record.sandbox_id)
        draft = Path(durable.draft_path(home))
        lock: int | None = None
        try:
            _make_directory(draft)
            lock = exclusion.lock_new(draft)
            assert lock is not None  # no other process knows the draft's name
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
        """Record the checkpoint that the sandbox continues from.

        It is stored as a symbolic link, because replacing a file waits for the disk and this may happen before every
        command.
        """
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
        """Return the record of a sandbox, or None if it is missing or unreadable."""
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
        """Return the drafts whose writer died, by sandbox id. They are all that exists of a sandbox whose maker was
        killed while it wrote the record."""
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
            # The deletion mark is removed last, so that a partly removed directory is never taken for a sandbox.
            for name in sorted(os.listdir(home), key=lambda name: name == exclusion.MARK):
                (home / name).unlink(missing_ok=True)
            home.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            # Another process that observed the sandbox has just written a record of its end there.
            if error.errno != errno.ENOTEMPTY or not tries_left:
                raise
