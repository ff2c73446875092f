"""Connections to an agent behind a virtual kernel, which sockets of the host cannot reach.

The first connection is made with the sandbox: the agent's standard streams are one end of a socket pair. Every later
one is a bridge: the OCI runtime executes the agent's own `connect` command inside, whose standard streams are again one
end of a socket pair. The agent's socket is in the sandbox's own file system, so nothing of the host is mounted for it,
and memory can be saved once the bridges are closed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from atoll.engines.host import run_program
from atoll.engines.host.deadline import Deadline, readable
from atoll.engines.linux.layout import SandboxLayout
from atoll.engines.linux.runtimes.oci_runtimes import Runtime
from atoll.engines.linux.runtimes.runtime_call import AGENT, AGENT_SOCKET
from atoll.errors import EngineError, EngineUnavailableError

_LEAVING_S = 2.0
_LONG = 10 * 365 * 86400.0


class AgentBridges:
    def __init__(self, layout: SandboxLayout) -> None:
        self._layout = layout
        self._first: dict[str, socket.socket] = {}
        self._bridges: dict[int, asyncio.Task[None]] = {}

    def put(self, sandbox_id: str, stream: socket.socket) -> None:
        """Keep the connection that was made with the sandbox."""
        self._first[sandbox_id] = stream

    async def get(self, sandbox_id: str, runtime: Runtime) -> socket.socket:
        first = self._first.pop(sandbox_id, None)
        return first if first is not None else self._bridge(sandbox_id, runtime)

    def drop(self, sandbox_id: str) -> None:
        first = self._first.pop(sandbox_id, None)
        if first is not None:
            first.close()

    async def leave(self, sandbox_id: str) -> None:
        """Close the unused connection, and make sure that there is no other, because memory cannot be saved with an
        open bridge. Raises EngineError if a bridge stays open."""
        self.drop(sandbox_id)
        deadline = Deadline.after(_LEAVING_S)
        while _bridges_to(sandbox_id):
            if not deadline.left():
                raise EngineError(
                    f"another client is connected to sandbox '{sandbox_id}', so its memory cannot be saved",
                    hint="Close the other connections (`detach`), then try again.",
                )
            await asyncio.sleep(0.02)

    async def aclose(self) -> None:
        for sandbox_id in list(self._first):
            self.drop(sandbox_id)
        bridges = list(self._bridges.values())
        for bridge in bridges:
            bridge.cancel()
        await asyncio.gather(*bridges, return_exceptions=True)

    def _bridge(self, sandbox_id: str, runtime: Runtime) -> socket.socket:
        ours, theirs = socket.socketpair()
        state = self._layout.run(sandbox_id) / "runtime"
        null = run_program.nothing()
        try:
            pid = run_program.spawn(
                runtime.command(state, "exec", sandbox_id, AGENT, "connect", AGENT_SOCKET),
                (),
                (theirs.fileno(), theirs.fileno(), null),
            )
        except OSError as error:
            ours.close()
            raise EngineUnavailableError(f"cannot run '{Path(runtime.program).name}': {error.strerror}") from error
        finally:
            theirs.close()
            os.close(null)
        task = asyncio.create_task(_reap(pid), name=f"bridge to {sandbox_id}")
        self._bridges[pid] = task
        task.add_done_callback(lambda _: self._bridges.pop(pid, None))
        ours.setblocking(False)
        return ours


def _bridges_to(sandbox_id: str) -> bool:
    """Return whether any process on this machine is the outer end of a bridge to the sandbox."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                if b"exec" in words and sandbox_id.encode() in words and AGENT.encode() in words:
                    return True
    return False


async def _reap(pid: int) -> None:
    """Wait for the end of a bridge, which ends when either side closes it. Cancelling kills it."""
    pidfd = os.pidfd_open(pid)
    try:
        await readable({pidfd}, Deadline.after(_LONG))
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        run_program.reap(pid)
