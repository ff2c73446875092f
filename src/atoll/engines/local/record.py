"""What is written down about a sandbox, so that another process of ours finds it again.

A record is written before anything is started and completed afterwards. Whatever moment our process dies at, the next
one sees that the sandbox exists, and can end it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from atoll.engines.base import limit_details
from atoll.engines.local.processes import ProcessRef, boot_id
from atoll.errors import SpecError
from atoll.model import Cause, EffectiveLimits, Limits, SandboxSpec

_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_FILE = "record.json"


class Ended(BaseModel):
    """Why a sandbox is dead. Kept, because nobody can find it out a second time."""

    model_config = ConfigDict(frozen=True)
    cause: Cause
    reason: str


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)
    version: Literal[1] = 1
    sandbox_id: str
    engine: str
    installation: str
    spec: SandboxSpec
    defaults: Limits = Limits()
    """What the engine gave where the spec has no limit."""
    left_out: tuple[str, ...] | None = None
    """The names of defaults that could not be enforced. None: it was made before there were any."""
    created_at: float
    boot_id: str
    creator: ProcessRef
    """Our process that makes it: as long as it lives, an incomplete record means that it is still at work."""
    uid: int | None = None
    """The user of its own that the sandbox has on this machine."""
    monitor: ProcessRef | None = None
    """The process that we started."""
    init: ProcessRef | None = None
    """The sandbox's own first process; the same as the monitor if there is no namespace between. None: not complete."""
    ended: Ended | None = None

    @property
    def limits(self) -> Limits:
        """Those that hold."""
        return self.spec.limits.over(self.defaults)

    def limit_details(self) -> dict[str, str]:
        """As its handle carries them."""
        return {} if self.left_out is None else limit_details(EffectiveLimits(self.defaults, self.left_out))

    def is_of_this_boot(self) -> bool:
        return self.boot_id == boot_id()

    def processes(self) -> set[ProcessRef]:
        """Those that may be running: the first one inside, with which all others inside end, and the one outside."""
        if not self.is_of_this_boot():
            return set()
        return {process for process in (self.init, self.monitor) if process is not None}


@dataclass(frozen=True, slots=True)
class Records:
    """The records of one engine, each in the directory of its sandbox."""

    directory: Path

    def home(self, sandbox_id: str) -> Path:
        """Where everything of that sandbox lives. Checks the name, which becomes part of paths."""
        if not _ID.fullmatch(sandbox_id):
            raise SpecError(
                f"{sandbox_id[:80]!r} cannot be the name of a sandbox",
                hint="Use up to 40 lower-case letters, digits, '-' and '_', beginning with a letter or digit.",
            )
        return self.directory / sandbox_id

    def write(self, record: Record) -> None:
        """Replace it as a whole. The sandbox's directory must exist."""
        path = self.home(record.sandbox_id) / _FILE
        draft = path.with_name(f".{_FILE}.{os.getpid()}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(record.model_dump_json())
        os.replace(draft, path)

    def read(self, sandbox_id: str) -> Record | None:
        """None when there is none, or none that can be understood."""
        try:
            return Record.model_validate_json((self.home(sandbox_id) / _FILE).read_bytes())
        except (OSError, ValidationError):
            return None

    def exists(self, sandbox_id: str) -> bool:
        return self.home(sandbox_id).is_dir()

    def ids(self) -> list[str]:
        try:
            with os.scandir(self.directory) as entries:
                return sorted(
                    entry.name for entry in entries if _ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                )
        except FileNotFoundError:
            return []

    def parts(self, sandbox_id: str) -> list[Path]:
        """What has to be removed, the record last: until then the sandbox is still found."""
        try:
            paths = [self.home(sandbox_id) / name for name in os.listdir(self.home(sandbox_id))]
        except FileNotFoundError:
            return []
        return sorted(paths, key=lambda path: path.name == _FILE)
