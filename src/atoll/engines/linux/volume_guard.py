"""The supervisor of a sandbox that has a writable volume: a small process outside of it that decides about set-id bits.

It is told over a socket which control groups to enter, so that it ends with the sandbox and what it does counts for it,
and then gets the listener of the sandbox's filter from whoever installs that. What it does is said in
`native/launcher/runtime/supervisor.c`.
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
    """Start one, in `groups`; once it has the listener it goes on in `lasting`. The descriptor of the socket that the
    listener is sent to; once `opened` is closed it only lives as long as somebody else has that socket, or is under the
    filter."""
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
