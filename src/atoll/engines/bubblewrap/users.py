"""Users for sandboxes, when Atoll runs as root: each sandbox runs as a user id that nothing else on this machine has.

A user id is claimed by creating a symbolic link from its number to the sandbox's id, which is atomic and which only one
process can do. The link's target does not exist. Before that, the user id is claimed for this installation on the
machine (`atoll.claims`).
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
"""This is far above what distributions and directory services assign to people and services."""
COUNT = 0x1000_0000
_ATTEMPTS = 64


@dataclass(frozen=True, slots=True)
class Users:
    directory: Path
    machine: Claims | None = None
    """The claims of all installations on this machine; None if there are no others."""

    def claim(self, sandbox_id: str) -> int:
        """Claim a free user id. The sandbox's directory must exist already, or `sweep` would release the id again."""
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
        """Release the users of sandboxes that do not exist any more."""
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
