"""Named volumes as users hold them: directories that outlive the sandboxes which mount them."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from atoll.engines.contract import Engine, having_volumes
from atoll.engines.named_volumes import NamedVolumes
from atoll.errors import ConflictError, SpecError
from atoll.model import parse_size
from atoll.model.spec import VOLUME_NAME_RULE, is_volume_name
from atoll.model.volume import VolumeInfo
from atoll.sandbox.sandbox import AsyncSandbox
from atoll.sandbox.sandbox_access import EngineChoice
from atoll.settings import Settings

_INSIDE = "/volume"
"""Where a sandbox that only copies files mounts the volume. This machine itself never opens a path of a volume."""


class AsyncVolumes:
    """The named volumes of this machine's user, or those of the caller on a server.

    A sandbox mounts them by name: `AsyncSandbox(volumes={"data": "/data"})`. One that does not exist is made then.
    `engine`, `server` and `api_key` say where they are, as for `AsyncSandbox`; `native` and `oci` share them.
    """

    # Inside the class `list` is the method, so the type is `builtins.list`.

    @classmethod
    async def create(
        cls,
        name: str,
        *,
        size: str | int | None = None,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> VolumeInfo:
        """Make an empty volume, which can hold `size` bytes or text such as `2g`. Raises ConflictError if there is one
        of that name."""
        async with _volumes(EngineChoice(engine, server, api_key, settings or Settings.load())) as volumes:
            return await volumes.create_volume(name, size_bytes=_size(size))

    @classmethod
    async def list(
        cls,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> builtins.list[VolumeInfo]:
        """Return all volumes, oldest first. Their users are not looked for; `inspect` does that."""
        async with _volumes(EngineChoice(engine, server, api_key, settings or Settings.load())) as volumes:
            return [*await volumes.volumes()]

    @classmethod
    async def inspect(
        cls,
        name: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> VolumeInfo:
        """Return a volume, with the sandboxes that mount it. Raises VolumeNotFoundError."""
        async with _volumes(EngineChoice(engine, server, api_key, settings or Settings.load())) as volumes:
            return await volumes.volume(name)

    @classmethod
    async def remove(
        cls,
        name: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Remove a volume with everything in it. Raises ConflictError, which names them, if sandboxes mount it."""
        async with _volumes(EngineChoice(engine, server, api_key, settings or Settings.load())) as volumes:
            await volumes.remove_volume(name)

    @classmethod
    async def prune(
        cls,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> builtins.list[str]:
        """Remove all volumes that no sandbox mounts, and return their names."""
        removed = []
        async with _volumes(EngineChoice(engine, server, api_key, settings or Settings.load())) as volumes:
            for each in await volumes.volumes():
                try:
                    await volumes.remove_volume(each.name)
                except ConflictError:
                    continue
                removed.append(each.name)
        return removed

    @classmethod
    async def snapshot(
        cls,
        name: str,
        snapshot: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> VolumeInfo:
        """Save the present content of a volume, which may be in use, as a read-only volume named `snapshot`."""
        async with _volumes(EngineChoice(engine, server, api_key, settings or Settings.load())) as volumes:
            return await volumes.copy_volume(name, snapshot, read_only=True)

    @classmethod
    async def copy(
        cls,
        name: str,
        copy: str,
        *,
        size: str | int | None = None,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> VolumeInfo:
        """Make a writable volume named `copy` with the present content of a volume or snapshot. Equal blocks are
        shared."""
        async with _volumes(EngineChoice(engine, server, api_key, settings or Settings.load())) as volumes:
            return await volumes.copy_volume(name, copy, size_bytes=_size(size))

    @classmethod
    async def restore(
        cls,
        name: str,
        snapshot: str,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> VolumeInfo:
        """Replace the content of a volume by that of a snapshot or another volume. Raises ConflictError if sandboxes
        mount it."""
        async with _volumes(EngineChoice(engine, server, api_key, settings or Settings.load())) as volumes:
            return await volumes.restore_volume(name, snapshot)

    @classmethod
    async def upload(
        cls,
        name: str,
        local: str | Path,
        path: str = "",
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Copy a file or directory of this machine into a volume, by a sandbox that exists only for that. `path` is
        where it goes in the volume; the default is the volume itself. The rules are those of `copy_to` of a sandbox. A
        volume that does not exist is made."""
        sandbox = AsyncSandbox(
            volumes=[f"{_named(name)}:{_INSIDE}"], engine=engine, server=server, api_key=api_key, settings=settings
        )
        async with sandbox:
            await sandbox.copy_to(local, _inside(path))

    @classmethod
    async def download(
        cls,
        name: str,
        path: str,
        local: str | Path,
        *,
        engine: str | Engine = "auto",
        server: str | None = None,
        api_key: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Copy a file or directory of a volume to this machine, by a sandbox that exists only for that. An empty `path`
        is everything. The rules are those of `copy_from` of a sandbox. Raises VolumeNotFoundError."""
        async with _volumes(EngineChoice(engine, server, api_key, settings or Settings.load())) as volumes:
            await volumes.volume(name)
        sandbox = AsyncSandbox(
            volumes=[f"{name}:{_INSIDE}:ro"], engine=engine, server=server, api_key=api_key, settings=settings
        )
        async with sandbox:
            await sandbox.copy_from(_inside(path), local)


def _named(name: str) -> str:
    if not is_volume_name(name):  # it would be a directory of the host
        raise SpecError(f"{name[:80]!r} cannot be the name of a volume", hint=f"{VOLUME_NAME_RULE.capitalize()}.")
    return name


def _inside(path: str) -> str:
    if ".." in path.split("/"):
        raise SpecError(f"'{path}' leads out of the volume", hint="Name a path inside it.")
    return f"{_INSIDE}/{path.lstrip('/')}" if path.strip("/") else _INSIDE


def _size(size: str | int | None) -> int | None:
    try:
        return None if size is None else parse_size(size)
    except ValueError as error:
        raise SpecError(str(error)) from None


@asynccontextmanager
async def _volumes(choice: EngineChoice) -> AsyncIterator[NamedVolumes]:
    """Yield the engine that has the volumes."""
    try:
        yield await having_volumes(await choice.engine(None))
    finally:
        choice.release()
