"""Byte streams to the agent in a container.

Two ways. When the container's first process can be seen from here (the engine is on this machine and we are root), its
socket is opened through `/proc/PID/root`: no detour, no copying, a tenth of a millisecond. Otherwise the engine
executes the agent's own `connect` inside, whose standard streams reach us over HTTP and are pumped into a socket pair
(`bridges.py`).

Code inside may do with the socket's path what it likes. So no link is ever followed on the way to it, it must be a
socket, and who listens on it must be the container's first process: we are never led to a socket of the host, and
nobody inside takes the agent's place.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from atoll.engines.docker.api import facts
from atoll.engines.docker.api.http import Http, RefusedError
from atoll.engines.docker.connect import agent_volume
from atoll.engines.docker.connect.exec_bridge import ExecBridges
from atoll.errors import AgentUnreachableError

_PAUSE_S = 0.005
_CREDENTIALS = struct.Struct("3i")
_FOLLOW_NOTHING = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class NotVisibleError(Exception):
    """The process cannot be seen from here. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running container, as far as a connection needs to know it."""

    container_id: str
    pid: int
    runtime: str

    @classmethod
    def of(cls, container: dict[str, Any]) -> Target:
        runtime = (container.get("HostConfig") or {}).get("Runtime")
        return cls(str(container["Id"]), int(container["State"]["Pid"]), str(runtime or ""))

    @classmethod
    def noted(cls, details: dict[str, str]) -> Target | None:
        """From a handle's details; None if it was not noted there."""
        try:
            return cls(details["container"], int(details["pid"]), details["runtime"])
        except (KeyError, ValueError):
            return None

    def details(self) -> dict[str, str]:
        return {"container": self.container_id, "pid": str(self.pid), "runtime": self.runtime}


class Streams:
    """`direct` False: always through the engine, as from another machine."""

    def __init__(self, http: Http, *, direct: bool = True) -> None:
        self.bridges = ExecBridges(http)
        self._direct = direct and http.endpoint.may_be_local

    async def direct(self, target: Target) -> socket.socket:
        """Raises NotVisibleError, OSError, AgentUnreachableError."""
        if not self.reaches(target):
            raise NotVisibleError
        return await connect_directly(target.pid, target.container_id)

    def reaches(self, target: Target) -> bool:
        """Whether a direct way is worth a try."""
        # Under another kernel the first process is that kernel's, and its root directory not the container's.
        return self._direct and not facts.has_own_kernel(target.runtime)

    async def open(self, target: Target) -> socket.socket:
        """Raises OSError, AgentUnreachableError, RefusedError, EngineUnavailableError."""
        with suppress(NotVisibleError):
            return await self.direct(target)
        return await self.bridges.connect(target.container_id, agent_volume.PROGRAM, agent_volume.SOCKET)

    async def answers(self, target: Target) -> bool:
        """Whether the agent of a container that has just been started listens already."""
        try:
            (await self.direct(target)).close()
            return True
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except NotVisibleError:
            pass
        try:
            return await self.bridges.knock(target.container_id, agent_volume.PROGRAM, agent_volume.SOCKET)
        except RefusedError:
            return False  # it has just ended, as the next look at it will show


async def connect_directly(
    pid: int, container_id: str, path: str = agent_volume.SOCKET, *, first: bool = True
) -> socket.socket:
    """Through the root directory of the container's first process, who must be the one that listens if `first`.

    Raises NotVisibleError if this is not possible from here, AgentUnreachableError if what is there is not the agent,
    OSError if it does not listen.
    """
    with _opened(pid, container_id, path) as fd:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.setblocking(False)
            while not _try_connect(stream, fd):  # noqa: ASYNC110
                # The agent is behind with accepting. The kernel tells nobody when there is room again.
                await asyncio.sleep(_PAUSE_S)
            size = _CREDENTIALS.size
            listener, _, _ = _CREDENTIALS.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
            if listener != pid if first else not is_in(listener, container_id):
                raise AgentUnreachableError("something in the sandbox has taken the place of its agent")
        except BaseException:
            stream.close()
            raise
        return stream


@contextmanager
def _opened(pid: int, container_id: str, path: str) -> Iterator[int]:
    """A descriptor of the socket itself, not of what a name leads to."""
    fds: list[int] = []
    try:
        try:
            fds.append(os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            if not is_in(pid, container_id):
                raise NotVisibleError
        except OSError as error:
            raise NotVisibleError from error
        *folders, name = path.strip("/").split("/")
        for folder in folders:
            fds.append(os.open(folder, _FOLLOW_NOTHING | os.O_DIRECTORY, dir_fd=fds[-1]))
        fds.append(os.open(name, _FOLLOW_NOTHING, dir_fd=fds[-1]))
        if not stat.S_ISSOCK(os.fstat(fds[-1]).st_mode):
            raise AgentUnreachableError("something in the sandbox has taken the place of its agent's socket")
        yield fds[-1]
    finally:
        for fd in fds:
            os.close(fd)


def is_in(pid: int, container_id: str) -> bool:
    """Whether a process of this machine belongs to the container, by its control group, which it cannot change."""
    with open(f"/proc/{pid}/cgroup", errors="replace") as groups:
        return container_id in groups.read()


def _try_connect(stream: socket.socket, fd: int) -> bool:
    try:
        stream.connect(f"/proc/self/fd/{fd}")
    except BlockingIOError:
        return False
    return True
