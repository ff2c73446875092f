"""An agent in a running container that Atoll did not create.

The agent is put there as a file and started by a shell of the container, with the container's own user and
restrictions. The shell waits for the end of its input, which is a connection that this process holds. When the
connection is closed, or this process dies, the shell kills the agent and removes its files. The connection is held as a
bare socket, so it belongs to no event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from atoll import agent_binary, workers
from atoll.engines.docker import container_state
from atoll.engines.docker.api import endpoint
from atoll.engines.docker.api.containers import Containers
from atoll.engines.docker.api.exchange import close
from atoll.engines.docker.api.http import SLOW_S, Http, RefusedError
from atoll.engines.docker.connect.agent_streams import NotVisibleError, Streams, Target, connect_directly
from atoll.engines.docker.connect.agent_volume import archive
from atoll.engines.docker.connect.exec_bridge import ExecBridges
from atoll.errors import AgentUnreachableError, EngineError, SandboxGoneError, SandboxNotFoundError
from atoll.model import Cause, State

_ANSWER_S = 20.0
_CONNECT_S = 10.0
_LEAVE_S = 5.0
_PAUSE_S = 0.01
_SCRIPT = """mkdir -p "$1" && cd "$1" || { rm -rf "$0"; exit 1; }
"$0/agent" --listen-path "$0/run/socket" --work-dir "$1" &
read -r _
kill -9 $!
rm -rf "$0"
"""
_SHELL = "/bin/sh"


class AttachedContainer:
    """An agent in a container of somebody else. `enter` creates it, `leave` ends it."""

    def __init__(self, http: Http, container: dict[str, Any], folder: str) -> None:
        self.container = container
        self._http = http
        self._bridges = ExecBridges(http)
        self._target = Target.of(container)
        self._folder = folder
        self._lifeline: socket.socket | None = None
        self._exec_id = ""

    @classmethod
    async def enter(
        cls,
        container: str,
        work_dir: str,
        env: Mapping[str, str],
        where: endpoint.Endpoint | None = None,
        *,
        direct: bool = True,
    ) -> AttachedContainer:
        """Start an agent in a container. Raises SandboxNotFoundError, SandboxGoneError, and EngineError if the
        container does not permit it."""
        http = Http(where or endpoint.find())
        found = await Containers(http).inspect(quote(container, safe=""))
        if found is None:
            raise SandboxNotFoundError(f"there is no container '{container}'")
        if not found["State"]["Running"]:
            raise SandboxGoneError(f"container '{container}' is not running", cause=Cause.EXIT)
        visit = cls(http, found, f"/.atoll-{secrets.token_hex(8)}")
        if not direct:
            visit._target = Target(visit._target.container_id, 0, visit._target.runtime)
        try:
            await visit._check_shell()
            await visit._move_in()
            await visit._start(work_dir, env)
        except RefusedError as error:
            await visit.leave()
            raise EngineError(
                f"the container '{container}' does not accept an agent: {error.message}",
                hint="Its root must be writable and it must have a shell.",
            ) from error
        except BaseException:
            await visit.leave()
            raise
        return visit

    async def connect(self) -> socket.socket:
        """A new stream to the agent. Raises AgentUnreachableError, SandboxGoneError."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                with suppress(NotVisibleError):
                    return await self._directly()
                return await self._bridges.connect(self._target.container_id, *self._paths)
        except (OSError, RefusedError) as error:  # a timeout is an OSError too
            await self.explain()
            reason = str(error) or "it does not answer"
            raise AgentUnreachableError(f"the agent in the container cannot be reached: {reason}") from error

    async def explain(self) -> None:
        """Raise SandboxGoneError if the container has ended; otherwise do nothing."""
        found = await Containers(self._http).inspect(self._target.container_id)
        seen = container_state.MISSING if found is None else container_state.observe(found)
        if seen.state in (State.STOPPED, State.MISSING, State.ERROR):
            cause = seen.cause or Cause.LOST
            raise SandboxGoneError(f"the container has ended: {seen.reason or cause}", cause=cause)

    async def leave(self) -> None:
        """End the agent and remove its files. May be repeated."""
        lifeline, self._lifeline = self._lifeline, None
        await self._bridges.aclose()
        if lifeline is not None:
            lifeline.close()
            await self._await_end()

    @property
    def _paths(self) -> tuple[str, str]:
        return f"{self._folder}/agent", f"{self._folder}/run/socket"

    async def _check_shell(self) -> None:
        """Make sure that there is a shell before any file is put into the container: the shell removes those files."""
        try:
            path = f"/containers/{self._target.container_id}/archive"
            await self._http.call("HEAD", path, query={"path": _SHELL})
        except RefusedError as error:
            if error.status == 404:
                raise EngineError(f"the container has no {_SHELL}") from error
            raise

    async def _move_in(self) -> None:
        program = await workers.run(workers.ENGINE, Path(agent_binary.path()).read_bytes)
        tar = archive(program, f"{self._folder.lstrip('/')}/")
        path = f"/containers/{self._target.container_id}/archive"
        await self._http.call("PUT", path, query={"path": "/"}, tar=tar, timeout_s=SLOW_S)

    async def _start(self, work_dir: str, env: Mapping[str, str]) -> None:
        body = {
            "Cmd": [_SHELL, "-c", _SCRIPT, self._folder, work_dir],
            "Env": [f"{name}={value}" for name, value in env.items()],
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
        }
        path = f"/containers/{self._target.container_id}/exec"
        self._exec_id = str((await self._http.call("POST", path, body=body, timeout_s=SLOW_S))["Id"])
        _, writer = await self._http.hijack(f"/exec/{self._exec_id}/start", {"Detach": False, "Tty": False})
        try:
            self._lifeline = writer.get_extra_info("socket").dup()
        finally:
            await close(writer)
        await self._await_agent(work_dir)

    async def _await_agent(self, work_dir: str) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                while not await self._answers():
                    if not await self._runs():
                        raise EngineError(f"the container's user cannot make or enter the directory '{work_dir}'")
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise AgentUnreachableError("the agent in the container did not answer in time") from None

    async def _answers(self) -> bool:
        try:
            (await self._directly()).close()
            return True
        except OSError:
            return False
        except NotVisibleError:
            return await self._bridges.knock(self._target.container_id, *self._paths)

    async def _directly(self) -> socket.socket:
        if not self._target.pid or not Streams(self._http).reaches(self._target):
            raise NotVisibleError
        return await connect_directly(self._target.pid, self._target.container_id, self._paths[1], first=False)

    async def _runs(self) -> bool:
        """Return whether the shell runs or is about to: the Docker engine answers before it starts the program."""
        state = await self._http.call("GET", f"/exec/{self._exec_id}/json")
        return bool(state.get("Running")) or state.get("ExitCode") is None

    async def _await_end(self) -> None:
        """Wait until the agent is gone, but not for long: a paused container ends it only after it is resumed."""
        with suppress(TimeoutError, RefusedError):
            async with asyncio.timeout(_LEAVE_S):
                while await self._runs():  # noqa: ASYNC110
                    await asyncio.sleep(_PAUSE_S)
