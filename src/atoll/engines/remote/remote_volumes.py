"""Named volumes of the caller on a server. The engine there has them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.engines.remote.rest_client import Server, seconds_since_1970
from atoll.errors import SpecError, VolumeNotFoundError
from atoll.model.spec import VOLUME_NAME_RULE, is_volume_name
from atoll.model.volume import VolumeInfo


class RemoteVolumes:
    """The part of the engine that implements `NamedVolumes`.

    The server knows who calls. Owners of a manager here are one user there, so their volumes have longer names there,
    which begin with a digest of the owner.
    """

    _server: Server

    async def create_volume(self, name: str, *, size_bytes: int | None = None, owner: str = "") -> VolumeInfo:
        body = {"name": name_there(name, owner), **_size(size_bytes)}
        return _info(await self._server.call("POST", "/volumes", safe=False, json=body), owner)

    async def copy_volume(
        self, source: str, name: str, *, read_only: bool = False, size_bytes: int | None = None, owner: str = ""
    ) -> VolumeInfo:
        body = {"name": name_there(name, owner), "read_only": read_only, **_size(size_bytes)}
        return _info(
            await self._server.call("POST", f"/volumes/{name_there(source, owner)}/copies", safe=False, json=body),
            owner,
        )

    async def restore_volume(self, name: str, source: str, *, owner: str = "") -> VolumeInfo:
        path = f"/volumes/{name_there(name, owner)}/restore"
        return _info(await self._server.call("POST", path, json={"source": name_there(source, owner)}), owner)

    async def volumes(self, *, owner: str | None = "") -> Sequence[VolumeInfo]:
        """List the volumes of an owner here, which are among those of the caller there."""
        me = (await self._server.call("GET", "/info"))["user_id"]
        found = await self._server.items("/volumes", {"owner": me})
        begin = _begin(owner or "")
        return [_info(each, owner or "") for each in found if owner is None or each["name"].startswith(begin)]

    async def volume(self, name: str, *, owner: str = "") -> VolumeInfo:
        return _info(await self._server.call("GET", f"/volumes/{name_there(name, owner)}"), owner)

    async def remove_volume(self, name: str, *, owner: str = "") -> None:
        try:
            await self._server.call("DELETE", f"/volumes/{name_there(name, owner)}")
        except VolumeNotFoundError:
            return


def name_there(name: str, owner: str) -> str:
    """Return the name that a volume of an owner here has on the server."""
    found = _begin(owner) + name
    if not is_volume_name(name) or not is_volume_name(found):
        raise SpecError(f"{name[:80]!r} cannot be the name of a volume", hint=f"{VOLUME_NAME_RULE.capitalize()}.")
    return found


def _begin(owner: str) -> str:
    return f"o{hashlib.sha256(owner.encode()).hexdigest()[:16]}-" if owner else ""


def _size(size_bytes: int | None) -> dict[str, int]:
    return {} if size_bytes is None else {"size": size_bytes}


def _info(found: Mapping[str, Any], owner: str) -> VolumeInfo:
    begin, source = _begin(owner), found["source"]
    return VolumeInfo(
        name=str(found["name"]).removeprefix(begin),
        created_at=seconds_since_1970(found["created_at"]),
        size_bytes=found["size_bytes"],
        used_bytes=found["used_bytes"],
        read_only=bool(found["read_only"]),
        source=None if source is None else str(source).removeprefix(begin),
        users=tuple(map(str, found["users"])),
        owner=owner,
    )
