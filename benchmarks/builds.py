"""Building from Dockerfiles: cached steps beside creating a sandbox, steps that run beside a real `docker build`.

The peers are those of Debian 13's Docker engine, in a root of their own: see `tests/builds/reference.py`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from atoll import AsyncSandbox
from atoll.builds.builder import Builder
from atoll.builds.request import BuildRequest
from atoll.engines.linux.native_engine import NativeEngine
from atoll.images import Images
from atoll.settings import Settings
from benchmarks.measure import Figure, Samples, take_turns

if TYPE_CHECKING:
    from builds.reference import Reference

ROOT = Path(__file__).parents[1]
IMAGE = "atoll-corpus/busybox:1"
STEPS, ROUNDS, DOCKER_ROUNDS = 10, 20, 3
FILES, FILE_BYTES = 10, 10 << 20
_SETTLED_S = 4.0
"""From this age on a file counts as settled, so that its digest is remembered."""


async def measure(directory: Path, engine: str) -> AsyncIterator[Figure]:
    if engine != "native":
        return
    settings = Settings(directory / "data", directory / "run")
    native, images = NativeEngine(settings), Images(settings.data_dir)
    try:
        archives = Path(os.environ.get("ATOLL_TEST_IMAGES") or "/var/tmp/atoll-test-images")
        subprocess.run([ROOT / "scripts" / "test-docker", "images", archives], check=True, capture_output=True)
        await images.import_tar(archives / "busybox.tar", IMAGE)
        ours = _Builds(directory, native, images, settings)
        yield await ours.cached()
        yield await ours.cached_with_context()
        for figure in await ours.uncached():
            yield figure
    finally:
        for handle in await native.list():
            await native.delete(handle)
        await native.gc()
        await native.aclose()


class _Builds:
    def __init__(self, directory: Path, engine: NativeEngine, images: Images, settings: Settings) -> None:
        self._directory, self._engine, self._settings = directory, engine, settings
        self._builder = Builder(engine, images, settings)

    def _context(self, name: str, *lines: str) -> Path:
        context = self._directory / name
        context.mkdir()
        (context / "Dockerfile").write_text("\n".join([f"FROM {IMAGE}", *lines]) + "\n")
        return context

    async def _build(self, context: Path, *, no_cache: bool = False) -> None:
        await self._builder.build(BuildRequest(context, no_cache=no_cache))

    async def cached(self) -> Figure:
        context = self._context("cached", *(f"RUN echo {number} > /{number}" for number in range(STEPS)))
        await self._build(context)

        async def build() -> None:
            await self._build(context)

        found = await take_turns({"build": build, "create": self._create}, ROUNDS)
        return Figure(
            f"{STEPS} cached RUN steps, p50",
            found["build"].p50 * 1e3,
            found["create"].p50 * 1e3,
            "ms",
            "creating a sandbox",
            at_most=1.5,
        )

    async def _create(self) -> float:
        sandbox = AsyncSandbox(image=IMAGE, engine=self._engine, settings=self._settings)
        started = time.perf_counter()
        await sandbox.create()
        seconds = time.perf_counter() - started
        await sandbox.cleanup()
        return seconds

    async def cached_with_context(self) -> Figure:
        context = self._context("large", "COPY . /all", *(f"RUN echo {number} > /{number}" for number in range(STEPS)))
        for number in range(FILES):
            (context / f"file{number}").write_bytes(os.urandom(FILE_BYTES))
        await asyncio.sleep(_SETTLED_S)
        await self._build(context)

        async def build() -> None:
            await self._build(context)

        async def read() -> None:
            await asyncio.to_thread(_read, context)

        found = await take_turns({"build": build, "read": read}, ROUNDS)
        return Figure(
            f"{STEPS} cached RUN steps with a context of {FILES * FILE_BYTES >> 20} MiB, p50",
            found["build"].p50 * 1e3,
            found["read"].p50 * 1e3,
            "ms",
            "reading the context",
            at_most=1.0,
        )

    async def uncached(self) -> list[Figure]:
        """Compare with both builders of Docker, in the same run and in turns."""
        sys.path.insert(0, str(ROOT / "tests"))
        from builds import reference

        context = self._context("uncached", *("RUN true" for _ in range(STEPS)))
        text = (context / "Dockerfile").read_text()
        running = reference.docker()
        docker = await asyncio.to_thread(running.__enter__)
        try:
            found = await self._turns(context, docker, text)
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
        return [
            Figure(
                f"{STEPS} RUN true without cache, p50, and {peer}",
                found["ours"].p50 * 1e3,
                found[peer].p50 * 1e3,
                "ms",
                peer,
                at_most=at_most,
            )
            for peer, at_most in (("classic builder", 0.1), ("BuildKit", 1 / 3))
        ]

    async def _turns(self, context: Path, docker: Reference, text: str) -> dict[str, Samples]:
        folder = docker.data / "shared" / "uncached"
        folder.mkdir()
        (folder / "Dockerfile").write_text(text)

        def by_docker(buildkit: str) -> None:
            command = ("docker", "build", "--quiet", "--no-cache", "--network=none", "/shared/uncached")
            docker.run(*command, variables={"DOCKER_BUILDKIT": buildkit})

        async def ours() -> None:
            await self._build(context, no_cache=True)

        async def classic() -> None:
            await asyncio.to_thread(by_docker, "0")

        async def buildkit() -> None:
            await asyncio.to_thread(by_docker, "1")

        candidates = {"ours": ours, "classic builder": classic, "BuildKit": buildkit}
        return await take_turns(candidates, DOCKER_ROUNDS, warm_up=1)


def _read(folder: Path) -> None:
    """Read every file once, without doing anything with it."""
    buffer = bytearray(1 << 20)
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
