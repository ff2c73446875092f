"""Users for sandboxes, when we are root: each sandbox runs as one that nobody else on this machine has.

A user is claimed by making a link of its number to the sandbox's name, which only one process can do, and which is done
as a whole or not at all. It leads nowhere. Before that it is claimed for this installation on the machine
(`claims.py`).
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.claims import Claims, uids_in_use
from atoll.engines.process_tree.process_record import Records
from atoll.errors import EngineError
from atoll.settings import owned_directory

FIRST = 0x4000_0000
"""Far above what distributions and directory services give to people and services."""
COUNT = 0x1000_0000
_ATTEMPTS = 64


@dataclass(frozen=True, slots=True)
class Users:
    directory: Path
    machine: Claims | None = None
    """The claims of all installations on this machine. None: there are no others."""

    def claim(self, sandbox_id: str) -> int:
        """A user that is free. The sandbox's directory must exist already, or `sweep` would take it back."""
        owned_directory(self.directory, 0o700)
        for _ in range(_ATTEMPTS):
            uid = FIRST + secrets.randbelow(COUNT)
            if self.machine is not None and not self.machine.take(str(uid), sandbox_id):
                continue
            with suppress(FileExistsError):
                os.symlink(sandbox_id, self.directory / str(uid))
                return uid
        raise EngineError("there is no free user for the sandbox")

    def release(self, uid: int) -> None:
        path = self.directory / str(uid)
        with suppress(FileNotFoundError):
            sandbox_id = os.readlink(path)
            path.unlink(missing_ok=True)
            if self.machine is not None:
                self.machine.release(str(uid), sandbox_id)

    def sweep(self, records: Records) -> None:
        """Give back the users of sandboxes that do not exist."""
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            with suppress(FileNotFoundError):
                if not records.exists(os.readlink(path)):
                    self.release(int(path.name))
        if self.machine is not None:
            for uid, sandbox_id in self.machine.own().items():
                if not records.exists(sandbox_id):
                    self.machine.release(uid, sandbox_id)
            used = uids_in_use()
            self.machine.collect(lambda uid: int(uid) in used)
