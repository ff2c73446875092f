"""The limits of containers that were changed after they were made, because a container's labels cannot be changed.

There is a file for each such sandbox. While a change is in progress, it also has the limits from before.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from atoll import durable
from atoll.model import Limits, SandboxSpec


class Change(BaseModel):
    model_config = ConfigDict(frozen=True)
    limits: Limits
    """The requested limits."""
    before: Limits | None = None
    """Those before a change that is in progress. None: `limits` are in force."""


@dataclass(frozen=True, slots=True)
class ChangedLimits:
    directory: Path

    def read(self, sandbox_id: str) -> Change | None:
        """Return the last change of a sandbox's limits; None if there was none."""
        try:
            return Change.model_validate_json((self.directory / sandbox_id).read_bytes())
        except (OSError, ValidationError):
            return None

    def now(self, sandbox_id: str, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with the limits that are requested now."""
        change = self.read(sandbox_id)
        return spec if change is None else spec.model_copy(update={"limits": change.limits})

    def write(self, sandbox_id: str, limits: Limits, before: Limits | None = None) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable.write(self.directory / sandbox_id, Change(limits=limits, before=before).model_dump_json())

    def forget(self, sandbox_id: str) -> None:
        """Forget the changes of a sandbox. May be repeated."""
        (self.directory / sandbox_id).unlink(missing_ok=True)

    def ids(self) -> list[str]:
        """Return the sandboxes whose limits were changed, and remove drafts of dead writers."""
        with suppress(FileNotFoundError):
            durable.remove_abandoned(self.directory, lambda path: path.unlink(missing_ok=True))
            return [name for name in os.listdir(self.directory) if not name.startswith(".")]
        return []
