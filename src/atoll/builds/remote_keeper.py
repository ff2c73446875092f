"""The images of a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from atoll.builds.remote_build import build_on_server, image_of
from atoll.builds.request import BuildRequest, BuiltImage, OnBuildEvent
from atoll.engines.remote.rest_client import Server
from atoll.images import Image

_TRANSFER_S = 3600.0


class RemoteKeeper:
    """The images of a server that its user may see."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def build(self, request: BuildRequest, on_event: OnBuildEvent) -> BuiltImage:
        return await build_on_server(self._server, request, on_event)

    async def list(self) -> Sequence[Image]:
        return [image_of(info) for info in await self._server.items("/images")]

    async def get(self, reference: str) -> Image:
        return image_of(await self._server.call("GET", "/images/inspect", params={"reference": reference}))

    async def pull(self, reference: str) -> Image:
        body = {"reference": reference}
        return image_of(await self._server.call("POST", "/images/pull", json=body, timeout_s=_TRANSFER_S))

    async def load(self, file: Path, name: str) -> Image:
        params = {"name": name}
        return image_of(await self._server.upload("/images/content", file, _TRANSFER_S, params=params))

    async def push(self, reference: str, target: str) -> str:
        body = {"reference": reference, "target": target or None}
        pushed = await self._server.call("POST", "/images/push", json=body, timeout_s=_TRANSFER_S)
        return f"{pushed['reference']}@{pushed['digest']}"

    async def save(self, reference: str, file: Path) -> None:
        await self._server.download(f"/images/content?{urlencode({'reference': reference})}", file, _TRANSFER_S)

    async def prune(self, unused_s: float) -> int:
        pruned = await self._server.call("POST", "/images/prune", json={"unused_s": unused_s}, timeout_s=_TRANSFER_S)
        return int(pruned["freed_bytes"])

    async def remove(self, reference: str) -> None:
        await self._server.call("DELETE", "/images", params={"reference": reference})
