"""Going back to a saved state: a container is replaced by another one.

A rollback first creates the new container beside the old one, under another name. Then the old one is removed, and the
new one gets its name and is started. If the process dies after the removal, the next process that looks at the sandbox
completes the rollback.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from atoll.cancellation import finish
from atoll.engines.docker.api.http import RefusedError
from atoll.engines.docker.api.image_pull import Image
from atoll.engines.docker.container_maker import maker_label
from atoll.engines.docker.container_plan import GIVEN, LEFT_OUT, Identity
from atoll.engines.docker.parts import DockerParts
from atoll.engines.docker.states import fresh_identity
from atoll.errors import EngineError
from atoll.model import Handle, SandboxSpec

ORIGIN, RESTORED = "atoll.origin", "atoll.restored"
NEXT = "-next"
_GOING_S, _PAUSE_S = 5.0, 0.05
_KILLED = 137


class DockerRollback(DockerParts, abc.ABC):
    @abc.abstractmethod
    async def _body(
        self, who: Identity, spec: SandboxSpec, image: Image, created_at: float, labels: Mapping[str, str]
    ) -> dict[str, Any]: ...

    async def _go_to(self, handle: Handle, container: dict[str, Any], image: Image) -> None:
        async with self._accounts.claimed():
            await finish(self._replace(handle, container, image))

    async def _replace(self, handle: Handle, container: dict[str, Any], image: Image) -> None:
        who = self._who(handle.sandbox_id)
        labels = (container.get("Config") or {}).get("Labels") or {}
        origin = str(labels.get(ORIGIN) or container["Image"])
        limits = {name: labels[name] for name in (GIVEN, LEFT_OUT) if name in labels}
        more = {ORIGIN: origin, RESTORED: "1", **limits, **maker_label()}
        body = await self._body(who, self._current(handle).spec, image, handle.created_at, more)
        await self._containers.remove(who.container + NEXT)
        try:
            await self._containers.make(who.container + NEXT, body)
        except RefusedError as error:
            raise EngineError(f"the Docker engine could not make the container again: {error.message}") from error
        if ORIGIN in labels and image.id == origin:
            await fresh_identity.freshen(self._http, who.container + NEXT, handle.sandbox_id)
        self._exclusion.refuse_deleted(handle.sandbox_id)
        # Removed by its id: the next process that looks at the sandbox may already have given its name to the new one.
        await self._containers.remove(str(container["Id"]))
        await self._rename(who.container)
        await self._completed(who.container)
        await self._await_again(who.container)

    async def _rename(self, name: str) -> None:
        try:
            await self._http.call("POST", f"/containers/{name}{NEXT}/rename", query={"name": name})
        except RefusedError as error:
            if error.status not in (404, 409):  # otherwise another process has renamed or removed it first
                raise EngineError(f"the Docker engine could not rename a container: {error.message}") from error

    async def _completed(self, name: str) -> dict[str, Any] | None:
        """Return the container of that name, after completing an interrupted rollback."""
        found = await self._containers.inspect(name)
        if (found is None or _is_going(found)) and await self._containers.inspect(name + NEXT) is not None:
            deadline = time.monotonic() + _GOING_S
            while found is not None and _is_going(found) and time.monotonic() < deadline:
                await asyncio.sleep(_PAUSE_S)  # the engine removes it, whether or not a request waits for that
                found = await self._containers.inspect(name)
            if found is not None:
                return found
            await self._rename(name)
            found = await self._containers.inspect(name)
        if found is not None and _is_waiting(found):
            async with self._accounts.claimed():
                self._accounts.renew(str((found.get("HostConfig") or {}).get("CgroupParent") or ""))
                with suppress(RefusedError):
                    await self._containers.start(name)
            found = await self._containers.inspect(name)
        return found

    async def _is_on_its_way_back(self, entry: Mapping[str, Any], sandbox_id: str) -> bool:
        """Return whether a container that was never started is needed: an operation is using it, or it is all that is
        left of the sandbox."""
        if self._exclusion.is_busy(sandbox_id):
            return True
        if not (entry.get("Labels") or {}).get(RESTORED):
            return False
        name = self._who(sandbox_id).container
        found = await self._containers.inspect(name)
        return found is None or found["Id"] == entry["Id"]


def _is_going(container: Mapping[str, Any]) -> bool:
    """Return whether the container is being removed, or was killed in order to be removed."""
    state = container.get("State") or {}
    return state.get("Status") in ("removing", "dead") or state.get("ExitCode") == _KILLED


def _is_waiting(container: Mapping[str, Any]) -> bool:
    labels = (container.get("Config") or {}).get("Labels") or {}
    return bool(labels.get(RESTORED)) and (container.get("State") or {}).get("Status") == "created"
