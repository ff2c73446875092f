"""Named volumes as volumes of the Docker engine, with its local driver.

Such a volume is a directory that only root of the Docker engine's machine can enter. The Docker engine can limit
neither its size nor copy it, so both are refused. Its name is made of the installation, the owner and the name that
users know; its labels say the same in full.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from atoll.engines.docker.api.http import SLOW_S, Http, RefusedError
from atoll.engines.docker.container_plan import (
    INSTALLATION,
    SANDBOX,
    VOLUME,
    VOLUME_OWNER,
    volume_id,
    volume_labels,
)
from atoll.engines.docker.parts import DockerParts
from atoll.errors import ConflictError, EngineError, SpecError, UnsupportedError, VolumeNotFoundError
from atoll.model.spec import VOLUME_NAME_RULE, is_volume_name
from atoll.model.volume import VolumeInfo


class ContainerVolumes:
    """The named volumes of an installation, as `NamedVolumes` without the sandboxes."""

    def __init__(self, http: Http, installation: str) -> None:
        self._http = http
        self._installation = installation

    async def create(self, name: str, owner: str) -> VolumeInfo:
        checked(name)
        if await self._inspect(name, owner) is not None:
            raise ConflictError(f"there is already a volume '{name}'", hint="Remove it first, or choose another name.")
        body = {
            "Name": volume_id(self._installation, owner, name),
            "Driver": "local",
            "Labels": volume_labels(self._installation, owner, name),
        }
        return _info(await self._call("POST", "/volumes/create", body=body))

    async def list(self, owner: str | None) -> Sequence[VolumeInfo]:
        filters = json.dumps({"label": [f"{INSTALLATION}={self._installation}", VOLUME]})
        found = await self._call("GET", "/volumes", query={"filters": filters})
        infos = [_info(each) for each in found.get("Volumes") or ()]
        mine = [each for each in infos if is_volume_name(each.name) and owner in (None, each.owner)]
        return sorted(mine, key=lambda each: each.created_at)

    async def get(self, name: str, owner: str) -> VolumeInfo:
        found = await self._inspect(checked(name), owner)
        if found is None:
            raise VolumeNotFoundError(f"there is no volume '{name}'", hint="'atoll volume ls' lists yours.")
        return _info(found, await self._users(name, owner))

    async def remove(self, name: str, owner: str) -> None:
        """Remove a volume. The Docker engine refuses this while a container mounts it."""
        path = f"/volumes/{volume_id(self._installation, owner, checked(name))}"
        if await self._inspect(name, owner) is None:
            return
        try:
            await self._http.call("DELETE", path, timeout_s=SLOW_S)
        except RefusedError as error:
            if error.status == 404:
                return
            if error.status == 409:
                users = ", ".join(await self._users(name, owner)) or "a container"
                raise ConflictError(
                    f"the volume '{name}' is in use by {users}", hint="Delete these sandboxes first."
                ) from error
            raise EngineError(f"the volume '{name}' cannot be removed: {error.message}") from error

    async def _users(self, name: str, owner: str) -> tuple[str, ...]:
        filters = json.dumps({"volume": [volume_id(self._installation, owner, name)]})
        found = await self._call("GET", "/containers/json", query={"all": "1", "filters": filters})
        return tuple(sorted(str((each.get("Labels") or {}).get(SANDBOX) or each.get("Id")) for each in found))

    async def _inspect(self, name: str, owner: str) -> dict[str, Any] | None:
        try:
            found = await self._http.call("GET", f"/volumes/{volume_id(self._installation, owner, name)}")
        except RefusedError as error:
            if error.status == 404:
                return None
            raise EngineError(f"the Docker engine cannot inspect a volume: {error.message}") from error
        # Anybody may make a volume of any name; only the label shows that it is ours.
        ours = isinstance(found, dict) and (found.get("Labels") or {}).get(INSTALLATION) == self._installation
        return found if ours else None

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        try:
            return await self._http.call(method, path, timeout_s=SLOW_S, **options)
        except RefusedError as error:
            raise EngineError(f"the Docker engine refuses a request about volumes: {error.message}") from error


def checked(name: str) -> str:
    if not is_volume_name(name):
        raise SpecError(f"{name[:80]!r} cannot be the name of a volume", hint=f"{VOLUME_NAME_RULE.capitalize()}.")
    return name


def _info(found: Mapping[str, Any], users: tuple[str, ...] = ()) -> VolumeInfo:
    labels = found.get("Labels") or {}
    try:
        created_at = datetime.fromisoformat(str(found.get("CreatedAt"))).timestamp()
    except ValueError:
        created_at = time.time()
    return VolumeInfo(
        name=str(labels.get(VOLUME, "")),
        created_at=created_at,
        size_bytes=None,
        used_bytes=None,
        users=users,
        owner=str(labels.get(VOLUME_OWNER, "")),
    )


class DockerVolumes(DockerParts):
    """The part of the engine that implements `NamedVolumes`."""

    async def create_volume(self, name: str, *, size_bytes: int | None = None, owner: str = "") -> VolumeInfo:
        if size_bytes is not None:
            raise UnsupportedError(
                "engine 'docker' cannot enforce the size of a volume",
                hint="Leave the size out, or use the engine 'native' or 'oci'.",
            )
        return await self._volumes.create(name, owner)

    async def copy_volume(
        self, source: str, name: str, *, read_only: bool = False, size_bytes: int | None = None, owner: str = ""
    ) -> VolumeInfo:
        raise _no_copies()

    async def restore_volume(self, name: str, source: str, *, owner: str = "") -> VolumeInfo:
        raise _no_copies()

    async def volumes(self, *, owner: str | None = "") -> Sequence[VolumeInfo]:
        return await self._volumes.list(owner)

    async def volume(self, name: str, *, owner: str = "") -> VolumeInfo:
        return await self._volumes.get(name, owner)

    async def remove_volume(self, name: str, *, owner: str = "") -> None:
        await self._volumes.remove(name, owner)

    @property
    def _volumes(self) -> ContainerVolumes:
        return ContainerVolumes(self._http, self._settings.installation_id())


def _no_copies() -> UnsupportedError:
    return UnsupportedError(
        "engine 'docker' cannot copy a volume as it is at one moment",
        hint="Mount both volumes in a sandbox and copy there, or use the engine 'native' or 'oci'.",
    )
