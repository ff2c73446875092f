"""The supervisor of a sandbox with a writable volume: a small process outside that decides about set-id bits.

The supervisor receives over a socket the control groups to enter, so that it ends with the sandbox and counts toward
the sandbox's limits. It then receives the listener of the sandbox's system call filter from the process that installs
the filter. `native/launcher/runtime/supervisor.c` describes its work.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from atoll.engines.host import run_program
from atoll.errors import EngineError
from atoll.waiting import Deadline


async def supervisor(
    program: Path,
    groups: Sequence[Path],
    deadline: Deadline,
    opened: ExitStack,
    *,
    lasting: Sequence[Path] = (),
    virtual_kernel: bool = False,
) -> int:
    """Start a supervisor in `groups`; once it has the listener it moves to `lasting`.

    Return the descriptor of the socket that the listener is sent to. After `opened` is closed, the supervisor lives
    only as long as another process has that socket or is under the filter.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    opened.callback(ours.close)
    with theirs:
        for lists in (groups, lasting):
            ours.send(b"".join(os.fsencode(path) + b"\0" for path in lists) + b"\0")
        command = (str(program), "supervise", "3", "virtual" if virtual_kernel else "namespaces")
        finished = await run_program.run(command, [theirs.fileno()], deadline, what="the supervisor")
    if finished.status != 0:
        raise EngineError("the supervisor of the sandbox's volumes could not be started")
    return ours.fileno()
