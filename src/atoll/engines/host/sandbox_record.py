"""The records of sandboxes on this machine, by which another process of the installation finds them again.

A record is written to the sandbox's own directory before anything else is created, and completed when the sandbox runs.
If the process dies at any moment, the next one sees that the sandbox exists and can end it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from atoll import durable
from atoll.engines.host.process_ref import ProcessRef, boot_id
from atoll.errors import SpecError
from atoll.model import Cause, Limits, SandboxSpec

RECORD_FILE = "record.json"
_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")


class Ended(BaseModel):
    """Why a sandbox ended. This is stored because it cannot be found out a second time."""

    model_config = ConfigDict(frozen=True)
    cause: Cause
    reason: str


class SandboxRecord(BaseModel):
    model_config = ConfigDict(frozen=True)
    version: Literal[1] = 1
    sandbox_id: str
    spec: SandboxSpec
    defaults: Limits = Limits()
    """The limits that the engine set where the spec has none."""
    created_at: float
    boot_id: str
    creator: ProcessRef
    """The process that creates the sandbox. While it lives, an incomplete record means that it is still at work."""
    init: ProcessRef | None = None
    """The sandbox's own first process; None while the record is incomplete."""
    ended: Ended | None = None

    @property
    def limits(self) -> Limits:
        """The limits that apply."""
        return self.spec.limits.over(self.defaults)

    def is_of_this_boot(self) -> bool:
        return self.boot_id == boot_id()


Kept = TypeVar("Kept", bound=SandboxRecord)


@dataclass(frozen=True, slots=True)
class RecordDirectory:
    """A directory for each sandbox, with its record in it."""

    directory: Path

    def home(self, sandbox_id: str) -> Path:
        """Return the directory with everything of that sandbox. Raises SpecError if the id cannot be part of a path."""
        if not is_sandbox_id(sandbox_id):
            raise SpecError(
                f"{sandbox_id[:80]!r} cannot be the name of a sandbox",
                hint="Use up to 40 lower-case letters, digits, '-' and '_', beginning with a letter or digit.",
            )
        return self.directory / sandbox_id

    def write(self, record: SandboxRecord) -> None:
        """Replace the record atomically. Raises FileNotFoundError if the sandbox was deleted meanwhile."""
        durable.write(self.home(record.sandbox_id) / RECORD_FILE, record.model_dump_json())

    def read_as(self, kind: type[Kept], sandbox_id: str) -> Kept | None:
        """Return the record; None if there is none or it cannot be read."""
        try:
            return kind.model_validate_json((self.home(sandbox_id) / RECORD_FILE).read_bytes())
        except (OSError, ValidationError):
            return None


def is_sandbox_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None
