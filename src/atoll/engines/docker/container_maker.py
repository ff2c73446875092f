"""Creates a container and waits until its agent answers. A failure is undone before it is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from atoll.engines.docker import container_state
from atoll.engines.docker.api.containers import Containers
from atoll.engines.docker.api.http import Http, RefusedError
from atoll.engines.docker.connect import agent_volume
from atoll.engines.docker.connect.agent_streams import Streams, Target
from atoll.engines.docker.connect.agent_volume import Agent
from atoll.engines.host.process_ref import ProcessRef, boot_id, this_process
from atoll.errors import (
    AgentUnreachableError,
    EngineError,
    EngineUnavailableError,
    SandboxError,
    SpecError,
    UnsupportedError,
)
from atoll.model import SandboxSpec

_ANSWER_S = 20.0
_PAUSE_S = 0.002
_LAST_REQUEST_S = 0.5
Prepare = Callable[[str], Awaitable[None]]


# A Docker engine completes a request although the client that sent it is gone, perhaps much later: a container appears
# that nobody waits for. So each container names its maker, and the next process of the installation finds and removes
# the containers whose maker is dead. A container that was ever started is a sandbox, and stays.
MAKER = "atoll.maker"


def maker_label() -> dict[str, str]:
    """Return the label for every container that this process makes."""
    me = this_process()
    return {MAKER: f"{me.pid} {me.started} {boot_id()}"}


def is_abandoned(entry: Mapping[str, Any]) -> bool:
    """Whether the container, as the engine lists it, was never started, and its maker can no longer start it."""
    words = str((entry.get("Labels") or {}).get(MAKER, "")).split()
    if entry.get("State") != "created" or len(words) != 3 or not (words[0] + words[1]).isdecimal():
        return False
    return words[2] != boot_id() or not ProcessRef(int(words[0]), int(words[1])).is_alive()


class ContainerMaker:
    def __init__(self, http: Http, containers: Containers, streams: Streams) -> None:
        self._http = http
        self._containers = containers
        self._streams = streams

    async def make(
        self, name: str, body: dict[str, Any], agent: Agent, spec: SandboxSpec, prepare: Prepare | None = None
    ) -> Target:
        """Create and start a container. `prepare` is called with its name before it is started.

        Must not be cancelled: the Docker engine would go on creating the container.
        """
        try:
            await self._start(name, body, prepare)
        except RefusedError as error:
            if agent_volume.HOME not in error.message:
                raise _refusal(spec, error) from error
            # Somebody removed the volume with the agent, and the engine created an empty one in its place.
            agent_volume.forget(self._http, agent)
            await agent_volume.fill(self._http, agent, body["Image"])
            await self._start_again(name, body, spec, prepare)
        try:
            return await self.await_agent(name)
        except BaseException as error:
            await self._undo(name, error)
            raise

    async def _start_again(self, name: str, body: dict[str, Any], spec: SandboxSpec, prepare: Prepare | None) -> None:
        try:
            await self._start(name, body, prepare)
        except RefusedError as error:
            raise _refusal(spec, error) from error

    async def _start(self, name: str, body: dict[str, Any], prepare: Prepare | None) -> None:
        try:
            await self._containers.make(name, body)
        except RefusedError:
            raise  # nothing was created, and a container that already has this name must not be removed
        except BaseException as error:
            await self._undo(name, error)
            raise
        try:
            if prepare is not None:
                await prepare(name)
            await self._containers.start(name)
        except BaseException as error:
            await self._undo(name, error)
            raise

    async def _undo(self, name: str, error: BaseException) -> None:
        """Remove the container. An engine that hangs is not waited for again; it reads the request when it
        continues."""
        hangs = isinstance(error, EngineUnavailableError)
        try:
            async with asyncio.timeout(_LAST_REQUEST_S if hangs else None):
                await self._containers.remove(name)
        except TimeoutError:
            error.add_note(f"and container '{name}' may still appear once the Docker engine answers again")
        except SandboxError as leftover:
            error.add_note(f"and cleaning up failed: {leftover}")

    async def await_agent(self, name: str) -> Target:
        try:
            async with asyncio.timeout(_ANSWER_S):
                while True:
                    container = await self._containers.inspect(name)
                    if container is None or not container["State"]["Running"]:
                        raise await self._stillborn(name, container)
                    target = Target.of(container)
                    if await self._streams.answers(target):
                        return target
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise AgentUnreachableError(
                "the agent of the new sandbox did not answer in time", hint="The machine may be overloaded."
            ) from None

    async def _stillborn(self, name: str, container: dict[str, Any] | None) -> SandboxError:
        if container is None:
            return EngineError("the sandbox was removed while it was being made")
        reason = container_state.observe(container).reason
        return EngineError(
            f"the sandbox ended while it was being made: {reason}; {await self._containers.last_words(name)}",
            hint="'docker info' and the log of the Docker engine may say more.",
        )


def _refusal(spec: SandboxSpec, error: RefusedError) -> SandboxError:
    """Translate the Docker engine's refusal to create or start a container."""
    said = error.message
    if error.status == 409 and "already in use" in said:
        return SpecError("there is already a sandbox of that name")
    for volume in spec.volumes:
        if volume.host and volume.host in said:
            return SpecError(f"the volume '{volume.host}' cannot be used: {said}")
    if "storage-opt" in said.lower() or "storage opt" in said.lower():
        return UnsupportedError(
            f"engine 'docker' cannot enforce disk here: {said}", hint="Leave the disk limit out, or use another engine."
        )
    return EngineError(f"the Docker engine could not make the sandbox: {said}", hint="Its own log may say more.")
