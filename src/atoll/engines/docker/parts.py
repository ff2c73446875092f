"""Base class of the Docker engine: its parts, and the names of a sandbox's container, image and private directories."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

from atoll.engines.docker import container_plan
from atoll.engines.docker.api import endpoint, facts, image_pull
from atoll.engines.docker.api.containers import Containers
from atoll.engines.docker.api.http import Http
from atoll.engines.docker.changed_limits import ChangedLimits
from atoll.engines.docker.connect.agent_streams import Streams
from atoll.engines.docker.connect.container_link import ContainerLinks
from atoll.engines.docker.container_accounts import ContainerAccounts
from atoll.engines.docker.container_maker import ContainerMaker
from atoll.engines.docker.container_plan import Identity
from atoll.engines.docker.states.commits import Commits
from atoll.engines.host.exclusion import Exclusion
from atoll.errors import ImageError, SandboxNotFoundError
from atoll.model import Handle, SandboxSpec
from atoll.settings import Settings

HOST_IMAGE = "host"


class DockerParts:
    """Creates each part when it is first needed."""

    def __init__(self, settings: Settings, where: endpoint.Endpoint | None = None, *, direct: bool = True) -> None:
        self._settings = settings
        self._where = where
        self._direct = direct

    @property
    def default_image(self) -> str:
        return self._settings.docker_image

    def container_name(self, sandbox_id: str) -> str:
        return self._who(sandbox_id).container

    async def container(self, sandbox_id: str) -> dict[str, Any]:
        """Return the container of a sandbox as the Docker API describes it."""
        found = await self._containers.inspect(self._who(sandbox_id).container)
        if found is None:
            raise SandboxNotFoundError(f"Sandbox {sandbox_id} not found")
        return found

    @functools.cached_property
    def _http(self) -> Http:
        return Http(self._where or endpoint.find())

    @functools.cached_property
    def _containers(self) -> Containers:
        return Containers(self._http)

    @functools.cached_property
    def _streams(self) -> Streams:
        return Streams(self._http, direct=self._direct)

    @functools.cached_property
    def _maker(self) -> ContainerMaker:
        return ContainerMaker(self._http, self._containers, self._streams)

    @functools.cached_property
    def _links(self) -> ContainerLinks:
        return ContainerLinks(self._settings, self._http)

    @functools.cached_property
    def _limits(self) -> ChangedLimits:
        return ChangedLimits(self._settings.data_dir / "changed-limits")

    @functools.cached_property
    def _accounts(self) -> ContainerAccounts:
        return ContainerAccounts(self._settings, self._http.endpoint)

    @functools.cached_property
    def _exclusion(self) -> Exclusion:
        return Exclusion(lambda sandbox_id: self._settings.engine_run_dir("docker") / sandbox_id, lasting=False)

    @property
    def _commits(self) -> Commits:
        return Commits(self._http, self._settings.installation_id())

    def _image_name(self, image: str) -> str:
        """Replace `host` by the default image: a container has no view of this machine's own /usr."""
        return self.default_image if image == HOST_IMAGE else image

    def _who(self, sandbox_id: str) -> Identity:
        return container_plan.identity(self._settings.installation_id(), sandbox_id)

    def _current(self, handle: Handle) -> Handle:
        """Return the handle with the limits that are requested now."""
        return dataclasses.replace(handle, spec=self._limits.now(handle.sandbox_id, handle.spec))

    def _private(self, known: facts.Facts) -> list[str]:
        """Return the directories that no sandbox may get as a volume, because they give control of the machine or of
        other sandboxes."""
        paths = [str(self._settings.data_dir), str(self._settings.run_dir), known.root_dir, self._http.endpoint.path]
        return [os.path.realpath(path) for path in paths if path]

    async def _await_again(self, name: str) -> None:
        await self._maker.await_agent(name)

    async def _base_image(self, spec: SandboxSpec, image_id: str) -> image_pull.Image:
        found = await image_pull.find(self._http, image_id)
        if found is None:
            raise ImageError(f"the Docker engine no longer has '{spec.image}', the image that the sandbox started from")
        return found
