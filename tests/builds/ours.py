"""Builds of the corpus by our own builder, with results in the same form as those of a real `docker build`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import leftovers
from atoll.builds.builder import Builder
from atoll.builds.request import BuildRequest
from atoll.engines.linux.native_engine import NativeEngine
from atoll.images import ImageConfig, Images
from atoll.settings import Settings
from builds import trees
from builds.corpus import ARCHIVES, BUSYBOX, SCRATCH, Case
from builds.reference import Built, normal_config

_SCRIPT = Path(__file__).parents[2] / "scripts" / "test-docker"


class Ours:
    """A builder with a data directory of its own, and the two base images."""

    def __init__(self, folder: Path, archives: Path) -> None:
        self.folder = folder
        self._archives = archives
        self._imported: set[str] = set()
        self.settings = Settings(folder / "data", folder / "run")
        self.engine = NativeEngine(self.settings)
        self.images = Images(self.settings.data_dir)
        self.builder = Builder(self.engine, self.images, self.settings)

    async def need(self, image: str) -> None:
        """Import a base image, unless it is there."""
        if image not in self._imported and image in ARCHIVES:
            await self.images.import_tar(self._archives / ARCHIVES[image], image)
            self._imported.add(image)

    async def build(self, case: Case) -> Built:
        for image in ARCHIVES:
            if image in case.text or image == BUSYBOX:
                await self.need(image)
        context = self.folder / "contexts" / case.name
        context.mkdir(parents=True)
        case.make_context(context)
        request = BuildRequest(
            context,
            case.file,
            name=f"built-{case.name}",
            args=case.args,
            secrets={name: value.encode() for name, value in case.secrets.items()},
            target=case.target,
        )
        try:
            built = (await self.builder.build(request)).image
            return Built(self.tree(built.reference), config_of(built.config))
        finally:
            shutil.rmtree(context)

    async def base(self, image: str) -> trees.Tree:
        if image == SCRATCH:
            return {}
        await self.need(image)
        return self.tree(image)

    def tree(self, reference: str) -> trees.Tree:
        with self.images.view(reference) as descriptor:
            return trees.of_directory(descriptor)


@contextlib.asynccontextmanager
async def our_builder() -> AsyncIterator[Ours]:
    images = Path(os.environ.get("ATOLL_TEST_IMAGES") or "/var/tmp/atoll-test-images")
    await asyncio.to_thread(subprocess.run, [str(_SCRIPT), "images", str(images)], check=True, capture_output=True)
    folder = Path(tempfile.mkdtemp(prefix="ab-", dir="/tmp"))
    folder.chmod(0o755)
    ours = Ours(folder, images)
    try:
        yield ours
    finally:
        await leftovers.emptied(ours.engine)
        shutil.rmtree(folder)


def config_of(config: ImageConfig) -> dict[str, Any]:
    """Return the configuration as Docker shows it."""
    return normal_config(
        {
            "Env": [f"{name}={value}" for name, value in config.env.items()],
            "User": config.user,
            "WorkingDir": config.work_dir,
            "Entrypoint": list(config.entrypoint),
            "Cmd": list(config.cmd),
            "Labels": dict(config.labels),
            "ExposedPorts": {port: {} for port in config.exposed_ports},
            "Volumes": {path: {} for path in config.volumes},
            "StopSignal": config.stop_signal,
            "Shell": list(config.shell),
            "Healthcheck": dict(config.healthcheck),
        }
    )
