"""Byte streams to the agent in a container.

There are two ways. If the container's first process is visible from here (the Docker engine is on this machine and
Atoll runs as root), its socket is opened through `/proc/PID/root`. That needs no detour and no copying, and takes a
tenth of a millisecond. Otherwise the Docker engine executes the agent's own `connect` inside, whose standard streams
arrive over HTTP and are copied to a socket pair (`exec_bridge.py`).

Code inside may do anything with the socket's path. So no symbolic link is ever followed on the way to it, it must be a
socket, and the listening process must be the container's first process. This way Atoll never connects to a socket of
the host, and no program inside can take the agent's place.
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
    """The process is not visible from here. This exception never leaves the package."""


@dataclass(frozen=True, slots=True)
class Target:
    """The facts about a running container that are needed to connect to it."""

    container_id: str
    pid: int
    runtime: str

    @classmethod
    def of(cls, container: dict[str, Any]) -> Target:
        runtime = (container.get("HostConfig") or {}).get("Runtime")
        return cls(str(container["Id"]), int(container["State"]["Pid"]), str(runtime or ""))

    @classmethod
    def noted(cls, details: dict[str, str]) -> Target | None:
        """Read a target from a handle's details; None if they do not contain one."""
        try:
            return cls(details["container"], int(details["pid"]), details["runtime"])
        except (KeyError, ValueError):
            return None

    def details(self) -> dict[str, str]:
        return {"container": self.container_id, "pid": str(self.pid), "runtime": self.runtime}


class Streams:
    """Opens streams to agents. With `direct=False` they always go through the Docker API, as from another machine."""

    def __init__(self, http: Http, *, direct: bool = True) -> None:
        self.bridges = ExecBridges(http)
        self._direct = direct and http.endpoint.may_be_local

    async def direct(self, target: Target) -> socket.socket:
        """Connect through /proc. Raises NotVisibleError, OSError, AgentUnreachableError."""
        if not self.reaches(target):
            raise NotVisibleError
        return await connect_directly(target.pid, target.container_id)

    def reaches(self, target: Target) -> bool:
        """Return whether a direct connection is worth a try."""
        # With another kernel, the first process is that kernel, and its root directory is not the container's.
        return self._direct and not facts.has_own_kernel(target.runtime)

    async def open(self, target: Target) -> socket.socket:
        """Connect to the agent in either way. Raises OSError, AgentUnreachableError, RefusedError,
        EngineUnavailableError."""
        with suppress(NotVisibleError):
            return await self.direct(target)
        return await self.bridges.connect(target.container_id, agent_volume.PROGRAM, agent_volume.SOCKET)

    async def answers(self, target: Target) -> bool:
        """Return whether the agent of a container that has just been started already listens."""
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
            return False  # the container has just ended, as the next inspection will show


async def connect_directly(
    pid: int, container_id: str, path: str = agent_volume.SOCKET, *, first: bool = True
) -> socket.socket:
    """Connect through the root directory of the container's first process.

    If `first` is true, that process must be the one that listens; otherwise any process of the container may be. Raises
    NotVisibleError if this is not possible from here, AgentUnreachableError if something other than the agent listens,
    OSError if nothing listens.
    """
    with _opened(pid, container_id, path) as fd:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.setblocking(False)
            while not _try_connect(stream, fd):  # noqa: ASYNC110
                # The agent's backlog is full, and the kernel does not report when there is room again.
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
    """Open the socket itself as an O_PATH descriptor, without following any symbolic link."""
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
    """Return whether a process of this machine belongs to the container, by its control group, which it cannot
    change."""
    with open(f"/proc/{pid}/cgroup", errors="replace") as groups:
        return container_id in groups.read()


def _try_connect(stream: socket.socket, fd: int) -> bool:
    try:
        stream.connect(f"/proc/self/fd/{fd}")
    except BlockingIOError:
        return False
    return True
