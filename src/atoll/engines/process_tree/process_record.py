"""The records of sandboxes that are trees of processes."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.engines.enforcement import limit_details
from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.host.sandbox_record import RECORD_FILE, RecordDirectory, SandboxRecord, is_sandbox_id
from atoll.model import EffectiveLimits


class Record(SandboxRecord):
    engine: str
    installation: str
    left_out: tuple[str, ...] | None = None
    """The names of defaults that could not be enforced. None: it was made before there were any."""
    uid: int | None = None
    """The user of its own that the sandbox has on this machine."""
    monitor: ProcessRef | None = None
    """The process that we started."""

    def limit_details(self) -> dict[str, str]:
        """As its handle carries them."""
        return {} if self.left_out is None else limit_details(EffectiveLimits(self.defaults, self.left_out))

    def processes(self) -> set[ProcessRef]:
        """Those that may be running: the first one inside, with which all others inside end, and the one outside."""
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

    def parts(self, sandbox_id: str) -> list[Path]:
        """What has to be removed, the record last: until then the sandbox is still found."""
        try:
            paths = [self.home(sandbox_id) / name for name in os.listdir(self.home(sandbox_id))]
        except FileNotFoundError:
            return []
        return sorted(paths, key=lambda path: path.name == RECORD_FILE)
