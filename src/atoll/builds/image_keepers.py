"""Where images are: on this machine, or on a server (`remote_keeper`). Both offer the same."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from atoll import workers
from atoll.builds.request import BuildRequest, BuiltImage, OnBuildEvent
from atoll.cancellation import finish
from atoll.engines.contract import Building, Engine, ImageKeeping
from atoll.errors import UnsupportedError
from atoll.images import Image, Images
from atoll.settings import Settings


class ImageKeeper(Protocol):
    async def build(self, request: BuildRequest, on_event: OnBuildEvent) -> BuiltImage:
        """Build an image."""

    async def list(self) -> Sequence[Image]:
        """Return all images, by name."""

    async def get(self, reference: str) -> Image:
        """Return one image. Raises ImageNotFoundError."""

    async def pull(self, reference: str) -> Image:
        """Fetch an image from its registry, as it is now."""

    async def push(self, reference: str, target: str) -> str:
        """Send an image to a registry. Returns its name there with the digest of its manifest."""

    async def save(self, reference: str, file: Path) -> None:
        """Write an image to a file that other programs read."""

    async def load(self, file: Path, name: str) -> Image:
        """Read an image from a file. Without a name, it has the one in the file."""

    async def remove(self, reference: str) -> None:
        """Remove an image."""

    async def prune(self, unused_s: float) -> int:
        """Remove what nobody has used for a while. Returns how many bytes were freed."""


class LocalKeeper:
    """The images of this machine. `engine` carries out builds."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._images = engine.images if isinstance(engine, ImageKeeping) else Images(settings.data_dir)

    async def build(self, request: BuildRequest, on_event: OnBuildEvent) -> BuiltImage:
        from atoll.builds.builder import Builder  # not needed for anything else

        if not isinstance(self._engine, Building):
            raise UnsupportedError(
                f"engine '{self._engine.name}' cannot build images",
                hint="Engines 'native' and 'oci' can, as root and with btrfs-progs installed.",
            )
        return await Builder(self._engine, self._images, self._settings).build(request, on_event)

    async def list(self) -> Sequence[Image]:
        return await self._images.ls()

    async def get(self, reference: str) -> Image:
        return await self._images.get(reference)

    async def pull(self, reference: str) -> Image:
        return await self._images.pull(reference)

    async def load(self, file: Path, name: str) -> Image:
        return await (self._images.import_tar(file, name) if name else self._images.load(file))

    async def push(self, reference: str, target: str) -> str:
        pushed = await self._images.push(reference, target)
        return f"{pushed.reference}@{pushed.digest}"

    async def save(self, reference: str, file: Path) -> None:
        await self._images.save(reference, file)

    async def prune(self, unused_s: float) -> int:
        return (await self._images.prune(all=True, unused_s=unused_s)).freed_bytes

    async def remove(self, reference: str) -> None:
        await self._images.remove(reference)
        await self._images.gc()


@asynccontextmanager
async def empty_context() -> AsyncIterator[Path]:
    """Yield an empty directory, for a build that copies nothing."""
    folder = Path(await workers.run(workers.ENGINE, tempfile.mkdtemp, prefix="atoll-context-"))
    try:
        yield folder
    finally:
        await finish(workers.run(workers.ENGINE, shutil.rmtree, folder))
