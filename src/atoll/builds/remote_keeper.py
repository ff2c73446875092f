"""The images of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from atoll.builds.remote_build import build_on_server, image_of
from atoll.builds.request import BuildRequest, BuiltImage, OnBuildEvent
from atoll.engines.remote.rest_client import Server
from atoll.errors import ImageError, SandboxTimeoutError
from atoll.images import Image
from atoll.waiting import Deadline

_TRANSFER_S = 3600.0
_PAUSE_S = 0.2


class RemoteKeeper:
    """The images of a server that its user may see."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def build(self, request: BuildRequest, on_event: OnBuildEvent) -> BuiltImage:
        return await build_on_server(self._server, request, on_event)

    async def list(self) -> Sequence[Image]:
        found = await self._server.items("/images")
        return [image_of(info) for info in found if info.get("status") == "ready"]

    async def get(self, reference: str) -> Image:
        return image_of(await self._server.call("GET", "/images/inspect", params={"name": reference}))

    async def pull(self, reference: str) -> Image:
        """Let the server pull the image, and wait until it is there."""
        info = await self._server.call("POST", "/images/pull", json={"name": reference})
        deadline = Deadline.after(_TRANSFER_S)
        while info["status"] == "pulling":
            if not deadline.left():
                raise SandboxTimeoutError(f"the image {reference!r} was not there in time")
            await asyncio.sleep(_PAUSE_S)
            info = await self._server.call("GET", "/images/inspect", params={"name": reference})
        if info["status"] == "failed":
            raise ImageError(str(info["detail"]))
        return image_of(info)

    async def load(self, file: Path, name: str) -> Image:
        params = {"name": name}
        return image_of(await self._server.upload("/images/content", file, _TRANSFER_S, params=params))

    async def push(self, reference: str, target: str) -> str:
        body = {"name": reference, "target": target or None}
        pushed = await self._server.call("POST", "/images/push", json=body, timeout_s=_TRANSFER_S)
        return f"{pushed['name']}@{pushed['digest']}"

    async def save(self, reference: str, file: Path) -> None:
        await self._server.download(f"/images/content?{urlencode({'name': reference})}", file, _TRANSFER_S)

    async def prune(self, unused_s: float) -> int:
        body = {"all": True, "older_days": unused_s / 86400}
        pruned = await self._server.call("POST", "/images/prune", json=body, timeout_s=_TRANSFER_S)
        return int(pruned["freed_bytes"])

    async def remove(self, reference: str) -> None:
        await self._server.call("DELETE", "/images", params={"name": reference})
