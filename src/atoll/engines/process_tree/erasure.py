"""The end of a sandbox: no process and no file of it stays."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

from atoll.engines.host import process_ref
from atoll.engines.host.deadline import Deadline
from atoll.engines.host.process_ref import ProcessRef
from atoll.engines.process_tree.process_record import Records
from atoll.removal import remove_tree


async def kill_all(find: Callable[[], set[ProcessRef]], deadline: Deadline) -> bool:
    """Kill what is found until nothing is: what was just being forked is found the next time."""
    while found := {process for process in find() if process.is_alive()}:
        if not await process_ref.kill(found, deadline):
            return False
    return True


def remove_home(records: Records, sandbox_id: str) -> None:
    """Remove the sandbox's directory. Several may try at once, also from other processes. Raises OSError."""
    home = records.home(sandbox_id)
    try:
        fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Whoever held the lock before may have removed it, and a new sandbox of the same name may be there by now.
        if not home.exists() or not os.path.samestat(os.fstat(fd), os.stat(home)):
            return
        for path in records.parts(sandbox_id):
            remove_tree(path)
        os.rmdir(home)
    finally:
        os.close(fd)
